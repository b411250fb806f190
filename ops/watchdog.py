"""Watches a run's workers from outside them: what is stuck goes to the log, to `headrace status` and to a metric.

It runs in the supervising process, so that no stopped or blocked worker takes it along. Its report is announced like a worker's,
as stage `watchdog`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final

import anyio
import msgspec
import structlog

from broker.api import Broker
from broker.errors import BrokerError
from ops.nodes.roll import UNANSWERED, NodeCalls
from ops.status import service_of
from pipeline.metrics import REPORT_PERIOD_S, REPORT_PREFIX, Metrics, WorkerReport, report_subject
from pipeline.presence import dead_nodes, ever_present, missing
from pipeline.watchdog import BROKER, GONE_PREFIX, STUCK_PREFIX, WATCHDOG, Load, Stuck, Watchdog, WatchSettings
from schemas.config import WatchdogSection

log = structlog.get_logger("headrace.watchdog")

_SAY_AGAIN_S: Final = 30.0


class RunWatch:
    """Listens to a run until cancelled."""

    def __init__(
        self, broker: Broker, settings: WatchdogSection, *, now: Callable[[], float] = anyio.current_time
    ) -> None:
        self.metrics: Final = Metrics(broker.run, WATCHDOG)
        self.stuck: Sequence[Stuck] = ()
        self._broker: Final = broker
        self._now: Final = now
        self._dog: Final = Watchdog(
            WatchSettings(stuck_after_s=settings.stuck_after_s, silent_after_s=settings.silent_after_s)
        )
        self._said: Final[dict[str, float]] = {}
        self._heard: Final[dict[str, float]] = {}
        """Worker → when it was heard last, by `now`."""
        self._silent_after_s: Final = settings.silent_after_s
        self._away_since: float | None = None
        self._calls: Final = NodeCalls(broker, silent_after_s=settings.silent_after_s)

    async def run(self) -> None:
        """For ever."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._listen)
            tasks.start_soon(self._calls.run)
            while True:
                await self.look()
                await anyio.sleep(REPORT_PERIOD_S)

    def reports(self) -> list[WorkerReport]:
        """For the metrics endpoint."""
        return [self.metrics.report()]

    async def look(self) -> None:
        """One look at the durables, and what follows from all that is known."""
        try:
            with anyio.fail_after(5.0):
                consumers = await self._broker.consumers()
                await self._count_nodes()
        except (BrokerError, TimeoutError) as error:
            self._tell([self._without_broker(str(error))])
            return
        self._away_since = None
        loads = {
            service_of(consumer.durable): Load(
                pending=consumer.num_pending, in_hand=consumer.num_ack_pending, num_waiting=consumer.num_waiting
            )
            for consumer in consumers
        }
        now_s = self._now()
        self._dog.weigh(loads, now_s)
        self._tell(self._dog.stuck(now_s))
        await self._announce()

    def _without_broker(self, reason: str) -> Stuck:
        self._away_since = self._away_since or time.time()
        return Stuck(
            stage=BROKER, kind="silent", waits_for=f"the broker's answer: {reason}", since_unix_s=self._away_since
        )

    async def _count_nodes(self) -> None:
        """Tell nodes of which no process is left, or whose supervisor is silent; let workers go that took their leave."""
        everybody, now_s = await ever_present(self._broker), self._now()
        self._dog.dismiss({one.worker for one in everybody if one.left})
        presences = [one for one in everybody if not one.left]
        heard = {worker for worker, heard_s in self._heard.items() if now_s - heard_s <= self._silent_after_s}
        without_process = dead_nodes(presences, missing(presences, heard=frozenset(heard), now=time.time()))
        gone = dict.fromkeys(self._calls.gone(), UNANSWERED) | dict.fromkeys(
            without_process, "none of its processes is left"
        )
        for held in (self.metrics.gauges, self.metrics.labels):
            for key in [
                key for key in held if key.startswith(GONE_PREFIX) and key.removeprefix(GONE_PREFIX) not in gone
            ]:
                del held[key]
        for node, text in gone.items():
            if GONE_PREFIX + node not in self.metrics.gauges:
                log.warning("a node is gone", node=node)
            self.metrics.gauges[GONE_PREFIX + node] = 1.0
            self.metrics.labels[GONE_PREFIX + node] = text

    async def _listen(self) -> None:
        async with self._broker.listen(f"{REPORT_PREFIX}.{self._broker.run}.>") as announcements:
            async for _subject, data in announcements:
                report = msgspec.msgpack.decode(data, type=WorkerReport)
                if report.stage != WATCHDOG:
                    self._heard[report.worker] = self._now()
                    self._dog.hear(report, self._now())

    def _tell(self, stuck: Sequence[Stuck]) -> None:
        self.stuck = stuck
        names, now = {verdict.stage for verdict in stuck}, time.time()
        for held in (self.metrics.gauges, self.metrics.labels):
            for key in [key for key in held if key.startswith(STUCK_PREFIX)]:
                if key.removeprefix(STUCK_PREFIX) not in names:
                    del held[key]
        for stage in [stage for stage in self._said if stage not in names]:
            del self._said[stage]
            log.info("a stage goes on", stage=stage)
        for verdict in stuck:
            self.metrics.gauges[STUCK_PREFIX + verdict.stage] = max(0.0, now - verdict.since_unix_s)
            self.metrics.labels[STUCK_PREFIX + verdict.stage] = msgspec.json.encode(verdict).decode()
            if now - self._said.get(verdict.stage, 0.0) >= _SAY_AGAIN_S:
                self._said[verdict.stage] = now
                log.warning(
                    "a stage is stuck",
                    stage=verdict.stage,
                    kind=verdict.kind,
                    waits_for=verdict.waits_for,
                    since_s=round(now - verdict.since_unix_s, 1),
                    worker=verdict.worker,
                )
        self.metrics.wait_for(f"{', '.join(sorted(names))} to go on" if names else "nothing: every stage goes on")

    async def _announce(self) -> None:
        try:
            report = msgspec.msgpack.encode(self.metrics.report())
            await self._broker.announce(report_subject(self._broker.run, WATCHDOG), report)
        except BrokerError as error:
            log.debug("the watchdog's report was not announced", error=str(error))
