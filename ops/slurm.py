"""What Slurm says of jobs, where its commands are at hand. Only told beside what is known: a process is dead when its lease is over."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Collection
from typing import Final

import anyio
import structlog

log = structlog.get_logger("headrace.slurm")

_DEADLINE_S: Final = 5.0


async def job_states(jobs: Collection[str]) -> dict[str, str]:
    """Job → its state (RUNNING, COMPLETED, NODE_FAIL …) as `sacct` has it; nothing where there is no Slurm, or it does not answer."""
    wanted = sorted({job for job in jobs if job.isdecimal()})
    if not wanted or shutil.which("sacct") is None:
        return {}
    command = [
        "sacct",
        "--noheader",
        "--parsable2",
        "--allocations",
        "--format=JobID,State",
        "--jobs",
        ",".join(wanted),
    ]
    said = b""
    with anyio.move_on_after(_DEADLINE_S) as scope:
        try:
            said = (await anyio.run_process(command, stdin=subprocess.DEVNULL, check=False)).stdout
        except OSError as error:
            log.debug("sacct can't be run", error=str(error))
    if scope.cancelled_caught:
        log.debug("sacct did not answer in time", deadline_s=_DEADLINE_S)
    found: dict[str, str] = {}
    for line in said.decode("utf-8", "replace").splitlines():
        job, bar, state = line.partition("|")
        if bar and job in wanted and state.split():
            found[job] = state.split()[0]  # "CANCELLED by 1000"
    return found
