"""The warm pool: harness processes that are started once and play many episodes at a time.

Knows jobs and outcomes; what a task or a status is, the server knows.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import AsyncGenerator

import anyio
import anyio.abc
import msgspec
import structlog
from anyio.streams.buffered import BufferedByteReceiveStream

from ops.arena.jobs import LINE_LIMIT_BYTES, End, Job, Outcome

_STOP_S = 5.0
"""How long a harness process may take to end its commands after SIGTERM, before it is killed."""
_START_S = 60.0
"""How long a job waits for a warm process where none runs."""
_log = structlog.get_logger("arena.pool")


class PoolError(Exception):
    """The harness processes can't be started."""


class _Worker:
    def __init__(self, process: anyio.abc.Process) -> None:
        self.process = process
        self.waiting: dict[str, asyncio.Future[Outcome]] = {}
        self.write_lock = anyio.Lock()


class HarnessPool:
    """Plays jobs on the least busy process; a process that dies fails its jobs and is started again."""

    def __init__(self, num_processes: int) -> None:
        self._num_processes = num_processes
        self._workers: list[_Worker] = []
        self._warm = anyio.Event()

    async def run(self) -> None:
        """Keep all processes running until cancelled; jobs wait until the first is warm.

        Raises:
            PoolError: One can't be started.
        """
        async with anyio.create_task_group() as group:
            for _ in range(self._num_processes):
                group.start_soon(self._keep_worker)

    def pids(self) -> list[int]:
        """Process ids of the harness processes."""
        return [worker.process.pid for worker in self._workers]

    async def play(self, job: Job) -> Outcome:
        """Play one job to its end; a harness process that dies makes it HARNESS_FAILED."""
        with anyio.move_on_after(_START_S):
            await self._warm.wait()
        if not self._workers:
            return Outcome(job_id=job.job_id, end=End.SETUP_FAILED, message="no harness process is running")
        worker = min(self._workers, key=lambda candidate: len(candidate.waiting))
        future: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        worker.waiting[job.job_id] = future
        try:
            stdin = worker.process.stdin
            if stdin is not None:
                async with worker.write_lock:
                    await stdin.send(msgspec.json.encode(job) + b"\n")
            return await future
        except (anyio.BrokenResourceError, anyio.ClosedResourceError):
            return _died(job.job_id)
        finally:
            worker.waiting.pop(job.job_id, None)

    async def _keep_worker(self) -> None:
        warm_once = False
        while True:
            async with _process() as process:
                worker = _Worker(process)
                stdout = process.stdout
                if stdout is None:
                    raise PoolError("a harness process has no output pipe")
                lines = BufferedByteReceiveStream(stdout)
                with contextlib.suppress(anyio.EndOfStream, anyio.IncompleteRead, anyio.ClosedResourceError):
                    await lines.receive_until(b"\n", LINE_LIMIT_BYTES)
                    self._workers.append(worker)
                    self._warm.set()
                    warm_once = True
                    while True:
                        _settle(worker, await lines.receive_until(b"\n", LINE_LIMIT_BYTES))
            if worker in self._workers:
                self._workers.remove(worker)
            if not self._workers:
                self._warm = anyio.Event()
            for job_id, future in worker.waiting.items():
                if not future.done():
                    future.set_result(_died(job_id))
            if not warm_once:
                raise PoolError(f"a harness process ended at its start with code {process.returncode}")
            _log.warning("harness process ended; starting another", code=process.returncode)


def _settle(worker: _Worker, line: bytes) -> None:
    outcome = msgspec.json.decode(line, type=Outcome)
    future = worker.waiting.get(outcome.job_id)
    if future is not None and not future.done():
        future.set_result(outcome)


def _died(job_id: str) -> Outcome:
    return Outcome(job_id=job_id, end=End.HARNESS_FAILED, message="the harness process died")


@contextlib.asynccontextmanager
async def _process() -> AsyncGenerator[anyio.abc.Process]:
    command = [sys.executable, "-m", "ops.arena.harness_process", str(os.getpid())]
    process = await anyio.open_process(command, stdin=subprocess.PIPE, stderr=None, env=_envs())
    try:
        yield process
    finally:
        with anyio.CancelScope(shield=True):
            if process.returncode is None:
                process.terminate()
            with anyio.move_on_after(_STOP_S):
                await process.wait()
            if process.returncode is None:
                process.kill()
                await process.wait()
            await process.aclose()


def _envs() -> dict[str, str]:
    """The server's environment without its secrets, and with the path it imports from."""
    kept = {
        name: value for name, value in os.environ.items() if name in ("PATH", "HOME", "LANG", "TMPDIR", "VIRTUAL_ENV")
    }
    return {**kept, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path), "PYTHONUNBUFFERED": "1"}
