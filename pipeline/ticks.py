"""Time as a message: `fold.tick.<n>`, created once by whichever worker comes first."""

from __future__ import annotations

from typing import Final

import anyio
import structlog

from broker.api import Broker
from broker.errors import BrokerError
from pipeline.log import RunLog
from pipeline.wall_clock import WallClock, wall_clock
from schemas.messages.sampling import Tick

log = structlog.get_logger("headrace.ticks")


class Ticker:
    """Publishes ticks while a fold that asks for time runs. Several tickers of one run share one row of ticks."""

    def __init__(self, broker: Broker, *, period_s: float, now: WallClock | None = None) -> None:
        self._log: Final = RunLog(broker)
        self._period_s: Final = period_s
        self._now: Final = now or wall_clock()
        self._last = 0

    def seen(self, ordinal: int) -> None:
        """A tick stands on the log."""
        self._last = max(self._last, ordinal)

    async def run(self) -> None:
        """Publish the next tick every `period_s`, unless another worker did. For ever.

        A pause of all workers is a pause of logical time: deadlines count only while somebody works.
        """
        while True:
            before = self._last
            await anyio.sleep(self._period_s)
            if self._last > before:
                continue
            tick = Tick(ordinal=self._last + 1, period_s=self._period_s, unix_time_s=self._now())
            try:
                standing = await self._log.publish(tick)
            except BrokerError as error:
                log.warning("a tick is late", error=str(error))
                continue
            self.seen(standing.ordinal)
