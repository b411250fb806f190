"""The warm pool: harness processes that are started once and play many episodes at a time.

Knows jobs and outcomes; what a task or a status is, the server knows.
"""

from __future__ import annotations

import os
import sys
from typing import Final

import anyio
import msgspec

from ops.arena.jobs import LINE_LIMIT_BYTES, End, Job, Outcome
from ops.line_pool import LinePool, LineProgram

_START_S: Final = 60.0
"""How long a job waits for a warm process where none runs."""


class PoolError(Exception):
    """The harness processes can't be started."""


class HarnessPool:
    """Plays jobs on the least busy process; a process that dies fails its jobs and is started again."""

    def __init__(self, num_processes: int) -> None:
        self._pool: Final = LinePool(_program(), num_processes)
        self.run: Final = self._pool.run
        self.pids: Final = self._pool.pids

    async def play(self, job: Job) -> Outcome:
        """Play one job to its end; a harness process that dies makes it HARNESS_FAILED."""
        worker = await self._pool.least_busy()
        if worker is None:
            return Outcome(job_id=job.job_id, end=End.SETUP_FAILED, message="no harness process is running")
        with self._pool.awaiting(worker, job.job_id) as outcome:
            try:
                await worker.say(msgspec.json.encode(job))
                return await outcome
            except (anyio.BrokenResourceError, anyio.ClosedResourceError):
                return self._pool.died(worker, job.job_id)


def _program() -> LineProgram[Outcome]:
    return LineProgram(
        "harness",
        [sys.executable, "-m", "ops.arena.harness_process", str(os.getpid())],
        _envs(),
        greeting=lambda _: "",
        answer=_answer,
        died=lambda job, _: Outcome(job_id=job, end=End.HARNESS_FAILED, message="the harness process died"),
        cannot_start=lambda reason: PoolError(f"a harness process can't be started: {reason}"),
        line_limit_bytes=LINE_LIMIT_BYTES,
        start_s=_START_S,
    )


def _answer(line: bytes) -> tuple[str, Outcome]:
    outcome = msgspec.json.decode(line, type=Outcome)
    return outcome.job_id, outcome


def _envs() -> dict[str, str]:
    """The server's environment without its secrets, and with the path it imports from."""
    kept = {
        name: value for name, value in os.environ.items() if name in ("PATH", "HOME", "LANG", "TMPDIR", "VIRTUAL_ENV")
    }
    return {**kept, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path), "PYTHONUNBUFFERED": "1"}
