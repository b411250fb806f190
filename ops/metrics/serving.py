"""The endpoint of one process: `/metrics` in Prometheus' text format, answered by a thread of its own.

The thread knows the latest reports alone, so that a scrape neither waits for the event loop nor holds it up.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from threading import Thread
from typing import TYPE_CHECKING, Final

import anyio
import structlog

from ops.metrics.definitions import DEFINITIONS, LABELS, Kind, samples
from pipeline.metrics import REPORT_PERIOD_S, WorkerReport
from schemas.config import MetricsSection
from schemas.errors import ConfigError

if TYPE_CHECKING:
    from wsgiref.simple_server import WSGIServer

    from prometheus_client.core import Metric

log = structlog.get_logger("headrace.metrics")

PLACES: Final = (
    "sampling",
    "fan_out",
    "arena_launch",
    "rewards",
    "assembly",
    "weights",
    "gateway",
    "trainer",
    "retention",
    "watchdog",
    "engine",
)
"""A process listens on `metrics.port` + the place of its first stage here; trainers add their rank."""
STRIDE: Final = 64
"""A further process of the same stage on one machine takes the first free one of port + 64, + 128 …"""
_TRIES: Final = 8


def first_port(base: int, stage: str, *, rank: int = 0) -> int:
    """Where a process of a stage listens."""
    return base + (PLACES.index(stage) if stage in PLACES else len(PLACES)) + rank


async def serve_metrics(settings: MetricsSection, stage: str, reports: Callable[[], list[WorkerReport]]) -> None:
    """Serve what `reports` says, for ever.

    Raises:
        ConfigError: prometheus-client is not installed, or no port is free.
    """
    exporter = Exporter()
    exporter.reports = reports()
    stop = start_endpoint(exporter, settings.host, first_port(settings.port, stage, rank=_rank()))
    try:
        while True:
            exporter.reports = reports()
            await anyio.sleep(REPORT_PERIOD_S)
    finally:
        stop()


def _rank() -> int:
    rank = os.environ.get("LOCAL_RANK", "0")
    return int(rank) if rank.isdecimal() else 0


class Exporter:
    """What prometheus-client collects from: a list that is replaced, never changed."""

    def __init__(self) -> None:
        self.reports: Sequence[WorkerReport] = ()

    def collect(self) -> Iterator[Metric]:
        """Metric families with their samples, in the order of the definitions."""
        from prometheus_client.core import (  # noqa: PLC0415 - an extra
            CounterMetricFamily,
            GaugeMetricFamily,
        )

        families: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}
        found = list(samples(self.reports))
        for definition in DEFINITIONS:
            family = CounterMetricFamily if definition.kind is Kind.COUNTER else GaugeMetricFamily
            labels = (*LABELS, definition.label) if definition.label else LABELS
            families[definition.name] = family(definition.name, definition.meaning, labels=labels)
        for sample in found:
            families[sample.definition.name].add_metric(sample.labels, sample.value)
        yield from (family for family in families.values() if family.samples)


def _stop(server: WSGIServer, thread: Thread) -> None:
    server.shutdown()
    server.server_close()
    thread.join()


def start_endpoint(exporter: Exporter, host: str, port: int) -> Callable[[], None]:
    """Listen on the first free port of a stage's; the function that ends it.

    Raises:
        ConfigError: see serve_metrics.
    """
    try:
        from prometheus_client import CollectorRegistry, start_http_server  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise ConfigError(
            "metrics.port: the endpoint needs prometheus-client: pip install 'headrace[metrics]', or set metrics.port = 0"
        ) from error
    registry = CollectorRegistry(auto_describe=False)
    registry.register(exporter)
    for number in range(_TRIES):
        wanted = port + number * STRIDE
        try:
            server, thread = start_http_server(wanted, addr=host, registry=registry)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise ConfigError(f"metrics.host {host}, port {wanted}: {error.strerror}") from error
            continue
        log.info("metrics are served", url=f"http://{host}:{wanted}/metrics")
        return partial(_stop, server, thread)
    raise ConfigError(
        f"metrics.port: {port} and {_TRIES - 1} ports above it in steps of {STRIDE} are taken on {host}: choose another base"
    )
