"""Nobody is left behind: what outlives the process that started it comes to the supervisor, which ends it.

    supervisor ─▶ worker ─▶ leash ─▶ agent ─▶ a program in a session of its own
         ▲                    ✗ kill -9            │
         └──────── adopted ◀───────────────────────┘  ─▶ SIGKILL

A process is an orphan when it was seen deeper in the tree before, and is a direct child now. Linux only.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import Final

import anyio
import psutil
import structlog

from ops.arena.lifeline import adopt_orphans

log = structlog.get_logger("headrace.supervisor")

PERIOD_S: Final = 1.0
_LOOKS_BEFORE_REAPING: Final = 3
"""A dead child that its starter has not collected by then has none."""

Known = tuple[int, float]
"""Process id and start time: together they are never used again."""


class OrphanWatch:
    """Remembers who was whose; pure."""

    def __init__(self) -> None:
        self._deep: Final[set[Known]] = set()

    def orphans(self, children: Mapping[Known, bool]) -> list[Known]:
        """Those that have lost their parent.

        Args:
            children: every descendant now → whether it is a direct child.
        """
        self._deep.intersection_update(children)
        found = [known for known, direct in children.items() if direct and known in self._deep]
        self._deep.update(known for known, direct in children.items() if not direct)
        return found


async def end_orphans(*, period_s: float = PERIOD_S) -> None:
    """Adopt what loses its parent below this process, and end it. For ever."""
    if not sys.platform.startswith("linux"):
        return
    adopt_orphans()
    watch, dead_looks, own = OrphanWatch(), dict[Known, int](), os.getpid()
    while True:
        processes = _descendants()
        for known in watch.orphans({known: parent == own for known, (parent, _) in processes.items()}):
            _end(processes[known][1])
        dead = {known for known, (parent, process) in processes.items() if parent == own and _is_dead(process)}
        dead_looks = {known: dead_looks.get(known, 0) + 1 for known in dead}
        for known, looks in dead_looks.items():
            if looks >= _LOOKS_BEFORE_REAPING:
                _collect(known[0])
        await anyio.sleep(period_s)


def _collect(pid: int) -> None:
    """Take note of a dead child's end, so that it leaves the process table."""
    with suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)


def _descendants() -> dict[Known, tuple[int, psutil.Process]]:
    """Process → its parent, and itself."""
    found: dict[Known, tuple[int, psutil.Process]] = {}
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            found[process.pid, process.create_time()] = (process.ppid(), process)
    return found


def _is_dead(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _end(orphan: psutil.Process) -> None:
    if _is_dead(orphan):
        return
    with suppress(psutil.NoSuchProcess):
        log.warning("a process outlived the one that started it and is ended", pid=orphan.pid, name=orphan.name())
        for process in (*orphan.children(recursive=True), orphan):
            with suppress(psutil.NoSuchProcess):
                process.kill()
