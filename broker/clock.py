"""Time as a port, so that a redelivery can be tested without waiting for it.

It must not know what is timed.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Protocol


class Clock(Protocol):
    """What the in-memory broker needs of time."""

    def now_s(self) -> float:
        """Seconds on a clock that never goes back."""
        ...

    def delay_s(self, until_s: float) -> float:
        """How long to really wait until this clock shows `until_s`; infinite if only `on_move` will tell."""
        ...

    def on_move(self, wake: Callable[[], None]) -> None:
        """Call `wake` whenever the clock is moved by hand."""
        ...


class SystemClock:
    """The machine's monotonic clock."""

    def now_s(self) -> float:
        return time.monotonic()

    def delay_s(self, until_s: float) -> float:
        return max(0.0, until_s - self.now_s())

    def on_move(self, wake: Callable[[], None]) -> None:
        """Nobody moves this clock by hand."""


class ManualClock:
    """Stands still until a test moves it."""

    def __init__(self, start_s: float = 1000.0) -> None:
        self._now_s = start_s
        self._wakes: list[Callable[[], None]] = []

    def now_s(self) -> float:
        return self._now_s

    def delay_s(self, until_s: float) -> float:
        return 0.0 if until_s <= self._now_s else math.inf

    def on_move(self, wake: Callable[[], None]) -> None:
        self._wakes.append(wake)

    def advance(self, seconds: float) -> None:
        """Move the clock and let whoever waits look at it."""
        self._now_s += seconds
        for wake in self._wakes:
            wake()
