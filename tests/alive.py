"""Whether a process lives, for tests that end processes."""

from __future__ import annotations

import psutil


def lives(pid: int) -> bool:
    """A zombie does not: it only waits for its parent to ask. One that ends while it is looked at does not, either."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
