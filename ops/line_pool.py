"""Processes that work on many jobs at a time, one JSON line a job and one an answer; each is started again when it dies.

Knows lines and job ids; what a job or an answer is, whoever opens the pool knows.
"""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import AsyncGenerator, Callable, Generator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Final, Generic, TypeVar

import anyio
import anyio.abc
import structlog
from anyio.streams.buffered import BufferedByteReceiveStream

log = structlog.get_logger("headrace.pool")
A = TypeVar("A")

STOP_S: Final = 5.0
"""How long a process may take to end what it started after SIGTERM, before it is killed."""
_KILLED_AT_START: Final = 5
"""So many starts of a process may end by a signal; one that kills itself is not started for ever."""
_LARGEST_OWN_CODE: Final = 128


class LineProgram(Generic[A]):
    """What the processes of a pool run, and how their lines are read."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        envs: Mapping[str, str],
        *,
        greeting: Callable[[bytes], str],
        answer: Callable[[bytes], tuple[str, A]],
        died: Callable[[str, int | None], A],
        cannot_start: Callable[[str], Exception],
        line_limit_bytes: int,
        start_s: float,
        restart_s: float = 0.0,
    ) -> None:
        """See the module.

        Args:
            name: for logs.
            command: argv.
            envs: the whole environment.
            greeting: of a process's first line: why it is not ready; empty when it is.
            answer: of any further line: job id and answer.
            died: the answer to a job (id) whose process ended with this code.
            cannot_start: the error of a process that was never ready.
            line_limit_bytes: longest line.
            start_s: how long a process may take to its first line, and a job may wait for a process.
            restart_s: between two starts, so that a job that always kills its process does not keep the machine busy.
        """
        self.name: Final = name
        self.command: Final = list(command)
        self.envs: Final = envs
        self.greeting: Final = greeting
        self.answer: Final = answer
        self.died: Final = died
        self.cannot_start: Final = cannot_start
        self.line_limit_bytes: Final = line_limit_bytes
        self.start_s: Final = start_s
        self.restart_s: Final = restart_s


class LineWorker(Generic[A]):
    """One process."""

    def __init__(self, process: anyio.abc.Process) -> None:
        self.process: Final = process
        self.waiting: Final[dict[str, asyncio.Future[A]]] = {}
        self._writing: Final = anyio.Lock()

    async def say(self, line: bytes) -> None:
        """Raises BrokenResourceError or ClosedResourceError when the process is gone."""
        if self.process.stdin is not None:
            async with self._writing:
                await self.process.stdin.send(line + b"\n")


class LinePool(Generic[A]):
    """Gives jobs to the least busy process."""

    def __init__(self, program: LineProgram[A], num_processes: int) -> None:
        self._program: Final = program
        self._num_processes: Final = num_processes
        self._workers: Final[list[LineWorker[A]]] = []
        self._warm = anyio.Event()

    def pids(self) -> list[int]:
        """Process ids."""
        return [worker.process.pid for worker in self._workers]

    async def warm(self) -> None:
        """Wait until a process is ready."""
        await self._warm.wait()

    async def run(self) -> None:
        """Keep all processes running until cancelled.

        Raises:
            Exception: the program's own `cannot_start`: a process was never ready.
        """
        async with anyio.create_task_group() as tasks:
            for _ in range(self._num_processes):
                tasks.start_soon(self._keep)

    async def least_busy(self) -> LineWorker[A] | None:
        """A process for the next job; None when none became ready in time."""
        with anyio.move_on_after(self._program.start_s):
            await self._warm.wait()
        return min(self._workers, key=lambda worker: len(worker.waiting), default=None)

    @contextmanager
    def awaiting(self, worker: LineWorker[A], job: str) -> Generator[asyncio.Future[A]]:
        """The answer to a job of this id, as long as the context."""
        future: asyncio.Future[A] = asyncio.get_running_loop().create_future()
        worker.waiting[job] = future
        try:
            yield future
        finally:
            worker.waiting.pop(job, None)

    def died(self, worker: LineWorker[A], job: str) -> A:
        """The answer to a job whose process ended."""
        return self._program.died(job, worker.process.returncode)

    def retire(self, worker: LineWorker[A]) -> None:
        """Give it no further job; those that find no process wait for the next."""
        if worker in self._workers:
            self._workers.remove(worker)
        if not self._workers and self._warm.is_set():
            self._warm = anyio.Event()

    async def _keep(self) -> None:
        warm_once, num_killed = False, 0
        while True:
            async with _process(self._program) as process:
                worker = LineWorker[A](process)
                failed = await self._serve(worker)
            warm_once |= not failed
            self.retire(worker)
            for job, future in worker.waiting.items():
                if not future.done():
                    future.set_result(self.died(worker, job))
            num_killed += _was_killed(process.returncode)
            if not warm_once and (not _was_killed(process.returncode) or num_killed > _KILLED_AT_START):
                raise self._program.cannot_start(failed)
            log.warning("a process ended; starting another", pool=self._program.name, code=process.returncode)
            await anyio.sleep(self._program.restart_s)

    async def _serve(self, worker: LineWorker[A]) -> str:
        """Settle jobs until the process ends; why it never became ready, or an empty string."""
        program = self._program
        if worker.process.stdout is None:
            return "it has no output pipe"
        lines = BufferedByteReceiveStream(worker.process.stdout)
        failed = f"its process did not become ready within {program.start_s:g} s"
        try:
            with anyio.move_on_after(program.start_s):
                failed = program.greeting(await lines.receive_until(b"\n", program.line_limit_bytes))
        except (anyio.EndOfStream, anyio.IncompleteRead, anyio.ClosedResourceError):
            failed = "its process ended at its start"
        if failed:
            return failed
        with suppress(anyio.EndOfStream, anyio.IncompleteRead, anyio.ClosedResourceError):
            self._workers.append(worker)
            self._warm.set()
            while True:
                job, answer = program.answer(await lines.receive_until(b"\n", program.line_limit_bytes))
                future = worker.waiting.get(job)
                if future is not None and not future.done():
                    future.set_result(answer)
        return ""


def _was_killed(code: int | None) -> bool:
    """By a signal, which a leash tells as a number of its own: what it runs is not at fault for that."""
    return code is not None and not 0 <= code <= _LARGEST_OWN_CODE


@asynccontextmanager
async def _process(program: LineProgram[A]) -> AsyncGenerator[anyio.abc.Process]:
    process = await anyio.open_process(program.command, stdin=subprocess.PIPE, stderr=None, env=program.envs)
    try:
        yield process
    finally:
        with anyio.CancelScope(shield=True):
            if process.returncode is None:
                process.terminate()
            with anyio.move_on_after(STOP_S):
                await process.wait()
            if process.returncode is None:
                process.kill()
                await process.wait()
            await process.aclose()
