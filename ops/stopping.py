"""Ctrl-C and SIGTERM: the first asks for an orderly end, a second one forces it.

1st signal ──▶ on_stop(): finish what is under way
2nd signal ──▶ the process ends at once with 128 + signal; nothing of a stored message is lost, it stands on the log
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import NoReturn

import anyio
import anyio.abc

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_RESTORE_SCREEN = "\x1b[?1049l\x1b[?25h"
"""Leaves the alternate screen and shows the cursor: what a live display would do at its end."""


@asynccontextmanager
async def until_stopped(
    on_stop: Callable[[], None], *, on_force: Callable[[], None] | None = None
) -> AsyncGenerator[None]:
    """Call `on_stop` at the first Ctrl-C or SIGTERM; a second one ends the process at once.

    Args:
        on_force: called before that, to end processes that this one started.
    """

    async def watch(*, task_status: anyio.abc.TaskStatus[None]) -> None:
        asked = False
        with anyio.open_signal_receiver(*_SIGNALS) as signals:
            task_status.started()
            async for number in signals:
                if asked:
                    force_exit(number, on_force)
                asked = True
                on_stop()

    async with anyio.create_task_group() as tasks:
        await tasks.start(watch)
        yield
        tasks.cancel_scope.cancel()


def force_exit(number: signal.Signals, on_force: Callable[[], None] | None = None) -> NoReturn:
    """End this process now, whatever it still waits for."""
    if on_force is not None:
        on_force()
    screen = _RESTORE_SCREEN if sys.stderr.isatty() else ""
    sys.stderr.write(f"{screen}headrace: ended at once by a second signal ({number.name})\n")
    sys.stderr.flush()
    os._exit(128 + number)
