"""The wall clock as workers see it, injected: a test of clock jumps moves it without touching the machine's.

It must not know who asks. Clocks that measure durations are monotonic and not here.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

OFFSET_FILE_ENV: Final = "HEADRACE_CLOCK_OFFSET_FILE"
"""Names a file with seconds to add to the machine's clock; for tests."""

WallClock = Callable[[], float]
"""Seconds since 1970; may jump either way at any time."""


def wall_clock(environ: Mapping[str, str] = os.environ) -> WallClock:
    """The machine's clock, or the one that the environment moves."""
    name = environ.get(OFFSET_FILE_ENV, "")
    if not name:
        return time.time
    path = Path(name)

    def moved() -> float:
        try:
            return time.time() + float(path.read_text(encoding="ascii") or 0.0)
        except FileNotFoundError:
            return time.time()

    return moved
