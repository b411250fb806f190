"""Whether the run goes on: every message that somebody's work put on the log, and the steps among them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

import anyio
import structlog

from broker.api import Broker
from broker.errors import BrokerError

log = structlog.get_logger("headrace.chaos")

_IDLE_TOPICS: Final = frozenset({"fold.tick", "run.started", "run.control", "run.retain"})
"""Messages that no work is behind."""


class Progress:
    """What the log's newest messages say."""

    def __init__(self, broker: Broker) -> None:
        self.num_messages = 0
        self.steps: Final[set[int]] = set()
        self.moved_unix_s = 0.0
        """When the newest message of any work was stored."""
        self._broker: Final = broker
        self._changed = anyio.Event()

    async def follow(self) -> None:
        """Read the log as it grows, for ever."""
        while True:
            try:
                await self._read()
            except BrokerError as error:
                log.debug("the log is read again", error=str(error))
                await anyio.sleep(0.2)

    async def _read(self) -> None:
        run = self._broker.run
        async with self._broker.read([f"hr.{run}.>"], headers_only=True) as records:
            async for record in records:
                self.num_messages += 1
                tokens = record.subject.split(".")
                topic = ".".join(tokens[2:4])
                if topic in _IDLE_TOPICS:
                    continue
                self.moved_unix_s = max(self.moved_unix_s, record.unix_time_s)
                if topic == "step.trained":
                    self.steps.add(int(tokens[4]))
                self._changed.set()
                self._changed = anyio.Event()

    async def moves(self, after_unix_s: float, *, deadline_s: float) -> float | None:
        """Seconds from a time to the first work after it; None: none within the deadline."""
        if not await self._until(lambda: self.moved_unix_s > after_unix_s, deadline_s):
            return None
        return self.moved_unix_s - after_unix_s

    async def next_step(self, *, deadline_s: float) -> float | None:
        """Seconds to the next trained step; None: none within the deadline."""
        began_s, before = time.monotonic(), len(self.steps)
        if not await self._until(lambda: len(self.steps) > before, deadline_s):
            return None
        return time.monotonic() - began_s

    async def _until(self, condition: Callable[[], bool], deadline_s: float) -> bool:
        with anyio.move_on_after(deadline_s):
            while not condition():
                await self._changed.wait()
            return True
        return False
