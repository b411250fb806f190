"""What every worker has: its run's folder, config and broker; its metrics; its way to end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import anyio
import msgspec
import structlog

from broker.api import Broker
from broker.errors import BrokerError
from ops.config import RunConfig
from ops.engines.plan import EnginePlan
from ops.run_folder import Endpoints, RunFolder
from pipeline.log import RunLog, RunPayloads
from pipeline.metrics import REPORT_PERIOD_S, Metrics, WorkerReport, report_subject
from pipeline.wall_clock import wall_clock

log = structlog.get_logger("headrace.worker")


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
    ) -> None:
        self.folder: Final = folder
        self.config: Final = config
        self.endpoints: Final = endpoints
        self.broker: Final = broker
        self.log: Final = RunLog(broker)
        self.payloads: Final = RunPayloads(broker)
        self.now: Final = wall_clock()
        self.draining: Final = anyio.Event()
        self.engine: Final = engine
        """The one engine that this process looks after, if it does."""
        self._metrics: Final[list[Metrics]] = []
        self._drains: Final[list[Callable[[], None]]] = []

    def metrics(self, stage: str) -> Metrics:
        """New counters, announced every second."""
        metrics = Metrics(self.broker.run, stage, now=self.now)
        self._metrics.append(metrics)
        return metrics

    def reports(self) -> list[WorkerReport]:
        """The counters of every service of this process, now."""
        return [metrics.report() for metrics in self._metrics]

    def on_drain(self, drain: Callable[[], None]) -> None:
        """Call this when the process is told to end."""
        self._drains.append(drain)

    def drain(self) -> None:
        """Ask every service to finish what it holds and end."""
        if not self.draining.is_set():
            self.draining.set()
            for drain in self._drains:
                drain()

    async def announce_reports(self) -> None:
        """Tell how every service is, for ever. A broker that is away only makes it silent."""
        while True:
            for metrics in self._metrics:
                subject = report_subject(self.broker.run, metrics.stage)
                try:
                    await self.broker.announce(subject, msgspec.msgpack.encode(metrics.report()))
                except BrokerError as error:
                    log.debug("a report was not announced", error=str(error))
            await anyio.sleep(REPORT_PERIOD_S)
