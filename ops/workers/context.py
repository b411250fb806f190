"""What every worker has: its run's folder, config and broker; its metrics; its way to end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import anyio
import msgspec
import structlog

from broker.api import Broker
from broker.errors import BrokerError
from broker.jetstream import JetStreamBroker
from ops.config import RunConfig
from ops.engines.plan import EnginePlan
from ops.run_folder import Endpoints, RunFolder
from pipeline.headroom import WorkerBroker
from pipeline.log import RunLog, RunPayloads
from pipeline.metrics import REPORT_PERIOD_S, Metrics, WorkerReport, report_subject
from pipeline.runner import describe
from pipeline.tracing import Tracing
from pipeline.wall_clock import wall_clock
from pipeline.watchdog import STOPPED_LABEL

log = structlog.get_logger("headrace.worker")

_REASON_CHARS: Final = 300
_LAST_WORD_S: Final = 2.0


def _nothing() -> None:
    pass


class WorkerContext:
    """Shared by the services of one process."""

    def __init__(
        self,
        folder: RunFolder,
        config: RunConfig,
        endpoints: Endpoints,
        broker: Broker,
        *,
        engine: EnginePlan | None = None,
        tracing: Tracing | None = None,
    ) -> None:
        self.folder: Final = folder
        self.config: Final = config
        self.endpoints: Final = endpoints
        self.store: Final = broker.payloads
        """The run's payloads as they are: for whoever collects them."""
        self.broker: Final = WorkerBroker(broker, tracing)
        self.log: Final = RunLog(self.broker, publish=self.broker.publish_patiently)
        self.payloads: Final = RunPayloads(self.broker, store=self.broker.bulk_payloads)
        self.now: Final = wall_clock()
        self.draining: Final = anyio.Event()
        self.engine: Final = engine
        """The one engine that this process looks after, if it does."""
        self._metrics: Final[list[Metrics]] = []
        self._drains: Final[list[Callable[[], None]]] = []
        self.on_stop: Callable[[], None] = _nothing
        """Called when a stage of this process stops for a reason of its own."""

    def metrics(self, stage: str) -> Metrics:
        """New counters, announced every second."""
        metrics = Metrics(self.broker.run, stage, now=self.now)
        self._metrics.append(metrics)
        return metrics

    def reports(self) -> list[WorkerReport]:
        """The counters of every service of this process, now."""
        return [self._report(metrics) for metrics in self._metrics]

    def _report(self, metrics: Metrics) -> WorkerReport:
        """A payload that waits for room or for the broker is told by every service of the process that seems to work."""
        report = self._with_connection(metrics.report())
        blocked = next(iter(self.broker.patience.blocked.items()), None)
        if blocked is None or report.waiting_for:
            return report
        return msgspec.structs.replace(report, waiting_for=blocked[0], waiting_since_unix_s=blocked[1])

    def _with_connection(self, report: WorkerReport) -> WorkerReport:
        """What the process's connections to the broker are doing, beside the stage's own figures."""
        broker = self.broker.inner
        if not isinstance(broker, JetStreamBroker):
            return report
        states = broker.connections()
        words = ", ".join(
            state.url if state.connected else f"away since {state.since_unix_s:.0f}: {state.last_error}"
            for state in states
        )
        return msgspec.structs.replace(
            report,
            gauges={
                **report.gauges,
                "broker_connected": float(all(state.connected for state in states)),
                "broker_reconnects": float(sum(state.reconnects for state in states)),
            },
            labels={**report.labels, "broker": words},
        )

    def on_drain(self, drain: Callable[[], None]) -> None:
        """Call this when the process is told to end."""
        self._drains.append(drain)

    def drain(self) -> None:
        """Ask every service to finish what it holds and end."""
        if not self.draining.is_set():
            self.draining.set()
            for drain in self._drains:
                drain()

    async def last_word(self, stage: str, error: Exception) -> None:
        """Tell why a stage of this process stops, as its last report, so that the reason is known where people look."""
        told = next((metrics for metrics in self._metrics if metrics.stage == stage), None) or self.metrics(stage)
        told.labels[STOPPED_LABEL] = describe(error)[:_REASON_CHARS]
        self.on_stop()
        log.error("a stage stops", stage=stage, error=told.labels[STOPPED_LABEL])
        with anyio.CancelScope(shield=True), anyio.move_on_after(_LAST_WORD_S):
            try:
                await self.broker.announce(
                    report_subject(self.broker.run, stage), msgspec.msgpack.encode(self._report(told))
                )
            except BrokerError as failure:
                log.debug("the reason of an end was not announced", error=str(failure))

    async def announce_reports(self) -> None:
        """Tell how every service is, for ever. A broker that is away only makes it silent."""
        while True:
            for metrics in self._metrics:
                subject = report_subject(self.broker.run, metrics.stage)
                try:
                    await self.broker.announce(subject, msgspec.msgpack.encode(self._report(metrics)))
                except BrokerError as error:
                    log.debug("a report was not announced", error=str(error))
            await anyio.sleep(REPORT_PERIOD_S)
