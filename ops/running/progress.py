"""What a run looks like while it goes: collected from the workers' reports and the log; drawn by `ops.running.screen`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import anyio
import msgspec

from broker.api import Broker
from broker.errors import BrokerError
from ops.config import RunConfig
from ops.status import service_of
from pipeline.generations import Generations
from pipeline.log import RunLog
from pipeline.metrics import REPORT_PREFIX, WorkerReport
from schemas.messages.training import StepAssembled, StepTrained
from schemas.topics import STEP_ASSEMBLED, STEP_TRAINED

STALE_REPORT_S: Final = 5.0


class Progress:
    """The latest of everything."""

    def __init__(self, config: RunConfig) -> None:
        self.config: Final = config
        self.reports: Final[dict[str, WorkerReport]] = {}
        """The newest report of each stage (of its busiest worker)."""
        self.rewards: Final[dict[int, float]] = {}
        """Mean reward by trained step."""
        self.step_s: Final[dict[int, float]] = {}
        self.stats: dict[str, float] = {}
        """Of the newest step."""
        self.pending: Final[dict[str, int]] = {}
        """Messages that wait for a stage."""
        self._assembled: Final[dict[int, float]] = {}

    async def follow(self, broker: Broker, changed: Callable[[Progress], None] | None = None) -> None:
        """Take in whatever is told, for ever; `changed` is called twice a second."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._listen, broker)
            tasks.start_soon(self._read, broker)
            tasks.start_soon(self._count, broker)
            while True:
                if changed is not None:
                    changed(self)
                await anyio.sleep(0.5)

    @property
    def step(self) -> int:
        """The newest trained step."""
        return max(self.rewards, default=0)

    @property
    def assembled_step(self) -> int:
        """The newest assembled step."""
        return max(self._assembled, default=0)

    async def _listen(self, broker: Broker) -> None:
        async with broker.listen(f"{REPORT_PREFIX}.{broker.run}.>") as announcements:
            async for _subject, data in announcements:
                report = msgspec.msgpack.decode(data, type=WorkerReport)
                self.reports[report.stage] = report

    async def _read(self, broker: Broker) -> None:
        generations = Generations()
        async with RunLog(broker).read([STEP_ASSEMBLED, STEP_TRAINED]) as entries:
            async for entry in entries:
                match entry.message:
                    case StepAssembled(step=step, mean_reward=reward):
                        self._assembled[step] = reward
                    case StepTrained(step=step, seconds=seconds, stats=stats, generation=generation) if (
                        generations.admits(generation)
                    ):
                        self.rewards[step] = self._assembled.get(step, 0.0)
                        self.step_s[step] = seconds
                        self.stats = stats
                    case _:
                        pass

    async def _count(self, broker: Broker) -> None:
        while True:
            try:
                for consumer in await broker.consumers():
                    self.pending[service_of(consumer.durable)] = consumer.num_pending + consumer.num_ack_pending
            except BrokerError:
                self.pending.clear()  # the broker is away: the numbers would lie
            await anyio.sleep(1.0)
