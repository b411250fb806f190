"""When a task is looked at: soon where its stream's tasks end soon, rarely where they run for hours. Pure but for what it remembers.

A task's first look comes when the stream's quickest recent task would be half done; then the waits grow with the task's age up to the
configured interval. Each wait is spread by a fixed share of the task, so that tasks launched together are not asked about together.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable
from typing import Final

import anyio

FIRST_WAIT_S: Final = 0.1
"""Of a stream whose tasks nobody has seen end yet, and the shortest wait."""
_AGE_SHARE: Final = 0.2
"""A wait as a share of the task's age: the end is seen at most so much late."""
_SPREAD: Final = 0.25
_REMEMBERED: Final = 64

Pause = Callable[[float, anyio.Event], Awaitable[None]]
"""Wait so many seconds, or until the event."""


async def pause(delay_s: float, over: anyio.Event) -> None:
    """Wait `delay_s`, or until there is nothing to wait for any more."""
    with anyio.move_on_after(delay_s):
        await over.wait()


class Pace:
    """How often one process looks at its tasks; shared by all of them."""

    def __init__(self, interval_s: float) -> None:
        self._interval_s: Final = interval_s
        self._seconds: Final[dict[str, deque[float]]] = {}
        self.lateness_s: Final[deque[float]] = deque(maxlen=8192)
        """How much later than planned the latest looks came."""

    def wait_s(self, stream: str, age_s: float, spread_unit: float) -> float:
        """Seconds until a task is looked at next.

        Args:
            stream: Its stream.
            age_s: Since its launch; 0 for the first look.
            spread_unit: The task's own number in [0, 1).
        """
        recent = self._seconds.get(stream)
        quickest_s = min(recent) if recent else 0.0
        wait_s = max(FIRST_WAIT_S, age_s * _AGE_SHARE, quickest_s / 2 - age_s)
        if age_s >= quickest_s / 2:
            wait_s = min(wait_s, self._interval_s)
        return wait_s * (1 + _SPREAD * (spread_unit - 0.5))

    def ended(self, stream: str, seconds: float) -> None:
        """Remember how long a task took."""
        self._seconds.setdefault(stream, deque(maxlen=_REMEMBERED)).append(seconds)

    def looked(self, late_s: float) -> None:
        """Remember how late a look came."""
        self.lateness_s.append(max(0.0, late_s))

    def lateness_p99_s(self) -> float:
        """The 99th percentile of the latest looks' lateness."""
        ordered = sorted(self.lateness_s)
        return ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))] if ordered else 0.0
