"""When a task is looked at: soon where its stream's tasks end soon, rarely where they run for long or where very many run.

The waits grow with the task's age up to the configured interval. Once a stream's tasks have been seen to end, the first look comes
shortly before its quickest would. All looks of a process together stay below a rate: with more tasks each waits longer. Each wait is
spread by a share of the task's own, so that tasks launched together are not asked about together.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager
from typing import Final

import anyio

SHORTEST_WAIT_S: Final = 0.1
LONGEST_JUMP_S: Final = 60.0
"""A task that fails at once is seen at most so late, however long its stream's tasks take."""
MAX_LOOKS_PER_S: Final = 400.0
"""Of one process: about a third of a core."""
LAUNCHES_AT_ONCE: Final = 64
_UNKNOWN_SHARE: Final = 0.5
_KNOWN_SHARE: Final = 0.1
"""A wait as a share of the task's age, before and after the stream's tasks were seen to end."""
_EARLY: Final = 0.9
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

    def __init__(self, interval_s: float, *, max_looks_per_s: float = MAX_LOOKS_PER_S) -> None:
        self._interval_s: Final = interval_s
        self._max_looks_per_s: Final = max_looks_per_s
        self._seconds: Final[dict[str, deque[float]]] = {}
        self._watching = 0
        self.launching: Final = anyio.CapacityLimiter(LAUNCHES_AT_ONCE)
        """Bounds the POSTs in flight: at most so many launches can be lost at once, and looks stay on time."""
        self.lateness_s: Final[deque[float]] = deque(maxlen=65536)
        """How much later than planned the latest looks came."""

    @contextmanager
    def watching(self) -> Generator[None]:
        """One more task is looked at."""
        self._watching += 1
        try:
            yield
        finally:
            self._watching -= 1

    def wait_s(self, stream: str, age_s: float, spread_unit: float) -> float:
        """Seconds until a task is looked at next.

        Args:
            stream: Its stream.
            age_s: Since its launch; 0 for the first look.
            spread_unit: The task's own number in [0, 1).
        """
        least_s = max(SHORTEST_WAIT_S, self._watching / self._max_looks_per_s)
        most_s = max(self._interval_s, least_s)
        recent = self._seconds.get(stream)
        share = _UNKNOWN_SHARE if recent is None else _KNOWN_SHARE
        wait_s = min(max(age_s * share, least_s), most_s)
        if recent is not None:
            wait_s = max(wait_s, min(min(recent) * _EARLY - age_s, LONGEST_JUMP_S))
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
