"""Counters of one worker, and the report that it announces every second (not on the log)."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from typing import Final

import msgspec

REPORT_PREFIX: Final = "hrm"
REPORT_PERIOD_S: Final = 1.0


class WorkerReport(msgspec.Struct, frozen=True, kw_only=True):
    """How a worker is: announced on `hrm.<run>.<stage>`."""

    run: str
    stage: str
    worker: str
    """host:pid"""
    unix_time_s: float
    received: int = 0
    succeeded: int = 0
    published: int = 0
    adopted: int = 0
    """Outputs that stood already."""
    retried: int = 0
    dead: int = 0
    in_flight: int = 0
    busy_s: float = 0.0
    waiting_for: str = ""
    """What it waits for now, in words; empty when it works."""
    waiting_since_unix_s: float = 0.0
    gauges: dict[str, float] = {}
    """The stage's own figures (tokens/s, step time, staleness …)."""
    labels: dict[str, str] = {}


def worker_name() -> str:
    """This process, as others see it."""
    return f"{socket.gethostname()}:{os.getpid()}"


def report_subject(run: str, stage: str) -> str:
    """Where a stage's workers announce their reports."""
    return f"{REPORT_PREFIX}.{run}.{stage}"


class Metrics:
    """Mutable counters behind WorkerReport; one per stage and process."""

    def __init__(self, run: str, stage: str, *, now: Callable[[], float] = time.time) -> None:
        self.run: Final = run
        self.stage: Final = stage
        self.received = 0
        self.succeeded = 0
        self.published = 0
        self.adopted = 0
        self.retried = 0
        self.dead = 0
        self.in_flight = 0
        self.busy_s = 0.0
        self.gauges: Final[dict[str, float]] = {}
        self.labels: Final[dict[str, str]] = {}
        self._now = now
        self._waiting_for = ""
        self._waiting_since = 0.0

    def wait_for(self, what: str) -> None:
        """Say what this worker waits for from now on; the same words again keep the former start."""
        if what != self._waiting_for:
            self._waiting_for = what
            self._waiting_since = self._now()

    def work(self) -> None:
        """It waits for nothing."""
        self._waiting_for = ""

    def report(self) -> WorkerReport:
        """The counters now."""
        return WorkerReport(
            run=self.run,
            stage=self.stage,
            worker=worker_name(),
            unix_time_s=self._now(),
            received=self.received,
            succeeded=self.succeeded,
            published=self.published,
            adopted=self.adopted,
            retried=self.retried,
            dead=self.dead,
            in_flight=self.in_flight,
            busy_s=self.busy_s,
            waiting_for=self._waiting_for,
            waiting_since_unix_s=self._waiting_since,
            gauges=dict(self.gauges),
            labels=dict(self.labels),
        )
