"""The command that a run leaves behind itself: to copy logs, to tell somebody, to free a node. Its failure changes nothing."""

from __future__ import annotations

import os
import signal
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Final

import anyio
import structlog

log = structlog.get_logger("headrace.run")

DEADLINE_S: Final = 600.0
LOG_DIR_ENV: Final = "LOG_DIR"


async def run_post_exit(command: str, logs: Path, *, deadline_s: float = DEADLINE_S) -> None:
    """Run a shell command to its end or its deadline; what it prints goes to `post_exit.log`. Never raises for what it does.

    Args:
        command: empty = nothing to do.
        logs: the folder of the run's logs, which the command finds as LOG_DIR.
        deadline_s: after it the command and all of its process group are killed.
    """
    if not command:
        return
    with anyio.CancelScope(shield=True):
        try:
            code = await _run(command, logs, deadline_s)
        except OSError as error:
            log.error("the post-exit command could not be started", error=str(error))  # noqa: TRY400 - the text says it all
            return
        if code is None:
            log.error("the post-exit command was ended", deadline_s=deadline_s)
        elif code:
            log.error("the post-exit command failed", exit=code, log=str(logs / "post_exit.log"))


async def _run(command: str, logs: Path, deadline_s: float) -> int | None:
    with (logs / "post_exit.log").open("ab") as sink:
        process = await anyio.open_process(
            ["/bin/sh", "-c", command],
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=sink,
            env={**os.environ, LOG_DIR_ENV: str(logs)},
            start_new_session=True,
        )
        try:
            with anyio.move_on_after(deadline_s):
                return await process.wait()
            return None
        finally:
            with suppress(ProcessLookupError):  # nothing of it is left
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
