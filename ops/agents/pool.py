"""The processes that play one stream's agents: several episodes in each, restarted when one dies.

Each runs under the leash of the local Arena's commands, so nothing of it survives this process. Knows jobs and answers; what an
answer means for an episode, the runner knows.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import subprocess
import sys
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Final, Literal

import anyio
import anyio.abc
import msgspec
import structlog
from anyio.streams.buffered import BufferedByteReceiveStream

from ops.agents.process import LINE_LIMIT_BYTES
from schemas.errors import ConfigError

log = structlog.get_logger("headrace.agents")

_PROCESS_FILE: Final = Path(__file__).with_name("process.py")
_LEASH_FILE: Final = Path(__file__).parents[1] / "arena" / "leash.py"
_START_S: Final = 120.0
"""How long a process may take to import the agent, and a job may wait for one."""
_STOP_S: Final = 5.0
_RESTART_S: Final = 0.5
"""Between two starts, so that an agent that always kills its process does not keep the machine busy."""


class AgentAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """How a job ended."""

    end: Literal["returned", "failed", "timeout", "cancelled", "rows", "died"]
    """`died`: its process did, which says nothing about the job."""
    id: str = ""
    reward: float | None = None
    rewards: dict[str, float] = {}
    """completion id → reward."""
    error: str = ""
    rows: list[dict[str, object]] = []


class AgentCall(msgspec.Struct, frozen=True, kw_only=True):
    """The arguments of one episode."""

    task: object
    base_url: str
    api_key: str
    session: str

    def __repr__(self) -> str:
        return f"AgentCall(session={self.session!r})"


class AgentProgram(msgspec.Struct, frozen=True, kw_only=True):
    """What a pool's processes run."""

    name: str
    """The stream, for logs and errors."""
    agent: str
    adapter: str = ""
    """File of the adapter that opens `agent`; empty: `agent` is the import path of an async function."""
    args: Mapping[str, object] = {}
    python: str = ""
    """Interpreter; empty: this one."""
    envs: Mapping[str, str] = {}
    """The whole environment."""
    num_processes: int = 1


class _Started(msgspec.Struct, frozen=True, kw_only=True):
    ready: bool = False
    failed: str = ""


class _Worker:
    def __init__(self, process: anyio.abc.Process) -> None:
        self.process: Final = process
        self.waiting: Final[dict[str, asyncio.Future[AgentAnswer]]] = {}
        self.write_lock: Final = anyio.Lock()

    async def say(self, order: Mapping[str, object]) -> None:
        """Raises BrokenResourceError or ClosedResourceError when the process is gone."""
        if self.process.stdin is not None:
            async with self.write_lock:
                await self.process.stdin.send(msgspec.json.encode(order) + b"\n")


class AgentPool:
    """Plays jobs on the least busy process; open with `open_pool`."""

    def __init__(self, program: AgentProgram) -> None:
        self._program: Final = program
        self._workers: Final[list[_Worker]] = []
        self._warm = anyio.Event()
        self._numbers: Final = itertools.count()

    def pids(self) -> list[int]:
        """Of the processes (of their leashes)."""
        return [worker.process.pid for worker in self._workers]

    async def warm(self) -> None:
        """Wait until a process is ready."""
        await self._warm.wait()

    async def play(self, call: AgentCall, *, timeout_s: float, over: anyio.Event) -> AgentAnswer:
        """Play an episode to its end, its time limit, or `over`, whichever comes first."""
        return await self._do({"play": call}, timeout_s=timeout_s, over=over)

    async def rows(self, limit: int, *, timeout_s: float = _START_S) -> list[dict[str, object]]:
        """The agent's own tasks.

        Raises:
            ConfigError: it can't list them.
        """
        answer = await self._do({"rows": limit}, timeout_s=timeout_s, over=anyio.Event())
        if answer.end != "rows":
            raise ConfigError(f"stream {self._program.name!r}: its tasks can't be listed: {answer.end} {answer.error}")
        return answer.rows

    async def run(self) -> None:
        """Keep all processes running until cancelled.

        Raises:
            ConfigError: the agent can't be loaded.
        """
        async with anyio.create_task_group() as tasks:
            for _ in range(self._program.num_processes):
                tasks.start_soon(self._keep_worker)

    async def _do(self, order: Mapping[str, object], *, timeout_s: float, over: anyio.Event) -> AgentAnswer:
        with anyio.move_on_after(_START_S):
            await self._warm.wait()
        if not self._workers:
            return AgentAnswer(end="died", error=f"no process of stream {self._program.name!r} is running")
        worker = min(self._workers, key=lambda candidate: len(candidate.waiting))
        job = str(next(self._numbers))
        future: asyncio.Future[AgentAnswer] = asyncio.get_running_loop().create_future()
        worker.waiting[job] = future
        try:
            await worker.say({"id": job, **order})
            if await _within(future, timeout_s, over):
                return future.result()
            await self._cancel(worker, job, future)
            return AgentAnswer(end="cancelled" if over.is_set() else "timeout")
        except (anyio.BrokenResourceError, anyio.ClosedResourceError):
            return _died(worker)
        finally:
            worker.waiting.pop(job, None)

    async def _cancel(self, worker: _Worker, job: str, future: asyncio.Future[AgentAnswer]) -> None:
        """Tell an episode to end; an agent that does not listen costs its process."""
        await worker.say({"id": job, "cancel": True})
        if not await _within(future, _STOP_S, anyio.Event()):
            log.warning("an agent does not end when cancelled; its process is ended", stream=self._program.name)
            self._retire(worker)
            with suppress(ProcessLookupError):
                worker.process.terminate()

    def _retire(self, worker: _Worker) -> None:
        """Give it no further job; those that find no process wait for the next."""
        if worker in self._workers:
            self._workers.remove(worker)
        if not self._workers and self._warm.is_set():
            self._warm = anyio.Event()

    async def _keep_worker(self) -> None:
        warm_once = False
        while True:
            async with _process(self._program) as process:
                worker = _Worker(process)
                failed = await self._serve(worker)
            warm_once |= not failed
            self._retire(worker)
            for future in worker.waiting.values():
                if not future.done():
                    future.set_result(_died(worker))
            if not warm_once:
                raise ConfigError(f"streams.{self._program.name}.agent: {self._program.agent!r} can't be run: {failed}")
            log.warning("an agent process ended; starting another", stream=self._program.name, code=process.returncode)
            await anyio.sleep(_RESTART_S)

    async def _serve(self, worker: _Worker) -> str:
        """Settle jobs until the process ends; why it never became ready, or an empty string."""
        if worker.process.stdout is None:
            return "it has no output pipe"
        lines = BufferedByteReceiveStream(worker.process.stdout)
        started = _Started(failed=f"its process did not become ready within {_START_S:g} s")
        with suppress(anyio.EndOfStream, anyio.IncompleteRead, anyio.ClosedResourceError):
            with anyio.move_on_after(_START_S):
                started = _Started(failed="its process ended at its start")
                started = msgspec.json.decode(await lines.receive_until(b"\n", LINE_LIMIT_BYTES), type=_Started)
            if not started.ready:
                return started.failed
            self._workers.append(worker)
            self._warm.set()
            while True:
                answer = msgspec.json.decode(await lines.receive_until(b"\n", LINE_LIMIT_BYTES), type=AgentAnswer)
                future = worker.waiting.get(answer.id)
                if future is not None and not future.done():
                    future.set_result(answer)
        return "" if started.ready else started.failed


async def _within(future: asyncio.Future[AgentAnswer], timeout_s: float, over: anyio.Event) -> bool:
    """Whether the answer came before the time and before the event."""
    watcher = asyncio.ensure_future(over.wait())
    try:
        await asyncio.wait((future, watcher), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        watcher.cancel()
    return future.done()


def _died(worker: _Worker) -> AgentAnswer:
    return AgentAnswer(end="died", error=f"the agent's process ended (code {worker.process.returncode})")


@asynccontextmanager
async def open_pool(program: AgentProgram) -> AsyncGenerator[AgentPool]:
    """A pool whose processes live as long as the context."""
    pool = AgentPool(program)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(pool.run)
        yield pool
        tasks.cancel_scope.cancel()


@asynccontextmanager
async def _process(program: AgentProgram) -> AsyncGenerator[anyio.abc.Process]:
    settings: dict[str, object] = {
        "agent": program.agent,
        "adapter": program.adapter,
        "args": program.args,
        "paths": _paths(program),
    }
    command = [
        *(sys.executable, "-S", "-E", str(_LEASH_FILE), str(os.getpid())),
        # -P: the file's own folder must not shadow the user's modules.
        *(program.python or sys.executable, "-P", str(_PROCESS_FILE), msgspec.json.encode(settings).decode()),
    ]
    process = await anyio.open_process(command, stdin=subprocess.PIPE, stderr=None, env=program.envs)
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


def _paths(program: AgentProgram) -> Sequence[str]:
    """Where the agent's modules are: as this process sees them, or the working folder for another interpreter."""
    return [str(Path.cwd())] if program.python else [path or str(Path.cwd()) for path in sys.path]
