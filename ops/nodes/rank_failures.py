"""Whether ranks that failed are worth starting again: a count of failures, by the clock and without any progress."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

WINDOW_S: Final = 120.0


class RankFailures:
    """Those of a trainer's sessions, as its leading node counts them."""

    def __init__(self, most: int, progress: Callable[[], int]) -> None:
        """Args:
        most: within two minutes, or in a row without progress however far apart.
        progress: changes with each sign of progress of the trainer.
        """
        self._most: Final = most
        self._progress: Final = progress
        self._stood = progress()
        self._at_s: Final[list[float]] = []
        self._num_fruitless = 0

    def begun(self) -> None:
        """A session's ranks start."""
        self._stood = self._progress()

    def failed(self, now_s: float) -> None:
        """Ranks of that session did."""
        self._at_s.append(now_s)
        self._num_fruitless = self._num_fruitless + 1 if self._progress() == self._stood else 1

    def verdict(self, now_s: float, *, for_good: bool) -> str:
        """Why they are not started again; empty: they are.

        Args:
            now_s: the clock.
            for_good: a rank said that starting it again won't help.
        """
        if for_good:
            return "the trainer's ranks can't run as they are set"
        if sum(at_s > now_s - WINDOW_S for at_s in self._at_s) > self._most:
            return f"the trainer's ranks failed {self._most + 1} times within {WINDOW_S:g} s"
        if self._num_fruitless > self._most:
            return f"the trainer's ranks failed {self._num_fruitless} times in a row without any progress"
        return ""
