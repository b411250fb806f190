"""The processes that play one stream's agents: several episodes in each, restarted when one dies.

Each runs under the leash of the local Arena's commands, so nothing of it survives this process. Knows jobs and answers; what an
answer means for an episode, the runner knows.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import sys
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Final, Literal

import anyio
import msgspec
import structlog

from ops.agents.process import LINE_LIMIT_BYTES
from ops.line_pool import STOP_S, LinePool, LineProgram, LineWorker
from pipeline.errors import RetryableError
from schemas.errors import ConfigError

log = structlog.get_logger("headrace.agents")

_PROCESS_FILE: Final = Path(__file__).with_name("process.py")
_LEASH_FILE: Final = Path(__file__).parents[1] / "arena" / "leash.py"
_START_S: Final = 120.0
"""How long a process may take to import the agent, and a job may wait for one."""
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


class AgentPool:
    """Plays jobs on the least busy process; open with `open_pool`."""

    def __init__(self, program: AgentProgram) -> None:
        self._program: Final = program
        self._pool: Final = LinePool(_line_program(program), program.num_processes)
        self._numbers: Final = itertools.count()
        self.pids: Final = self._pool.pids
        self.warm: Final = self._pool.warm
        self.run: Final = self._pool.run

    async def play(self, call: AgentCall, *, timeout_s: float, over: anyio.Event) -> AgentAnswer:
        """Play an episode to its end, its time limit, or `over`, whichever comes first."""
        return await self._do({"play": call}, timeout_s=timeout_s, over=over)

    async def rows(self, limit: int, *, timeout_s: float = _START_S) -> list[dict[str, object]]:
        """The agent's own tasks.

        Raises:
            ConfigError: it can't list them.
            RetryableError: its process died meanwhile.
        """
        answer = await self._do({"rows": limit}, timeout_s=timeout_s, over=anyio.Event())
        if answer.end == "died":
            raise RetryableError(
                f"stream {self._program.name!r}: the process that lists its tasks died: {answer.error}"
            )
        if answer.end != "rows":
            raise ConfigError(f"stream {self._program.name!r}: its tasks can't be listed: {answer.end} {answer.error}")
        return answer.rows

    async def _do(self, order: Mapping[str, object], *, timeout_s: float, over: anyio.Event) -> AgentAnswer:
        worker = await self._pool.least_busy()
        if worker is None:
            return AgentAnswer(end="died", error=f"no process of stream {self._program.name!r} is running")
        job = str(next(self._numbers))
        with self._pool.awaiting(worker, job) as answer:
            try:
                await worker.say(msgspec.json.encode({"id": job, **order}))
                if await _within(answer, timeout_s, over):
                    return answer.result()
                await self._cancel(worker, job, answer)
                return AgentAnswer(end="cancelled" if over.is_set() else "timeout")
            except (anyio.BrokenResourceError, anyio.ClosedResourceError):
                return self._pool.died(worker, job)

    async def _cancel(self, worker: LineWorker[AgentAnswer], job: str, answer: asyncio.Future[AgentAnswer]) -> None:
        """Tell an episode to end; an agent that does not listen costs its process."""
        await worker.say(msgspec.json.encode({"id": job, "cancel": True}))
        if not await _within(answer, STOP_S, anyio.Event()):
            log.warning("an agent does not end when cancelled; its process is ended", stream=self._program.name)
            self._pool.retire(worker)
            with suppress(ProcessLookupError):
                worker.process.terminate()


async def _within(future: asyncio.Future[AgentAnswer], timeout_s: float, over: anyio.Event) -> bool:
    """Whether the answer came before the time and before the event."""
    watcher = asyncio.ensure_future(over.wait())
    try:
        await asyncio.wait((future, watcher), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        watcher.cancel()
    return future.done()


@asynccontextmanager
async def open_pool(program: AgentProgram) -> AsyncGenerator[AgentPool]:
    """A pool whose processes live as long as the context."""
    pool = AgentPool(program)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(pool.run)
        yield pool
        tasks.cancel_scope.cancel()


def _line_program(program: AgentProgram) -> LineProgram[AgentAnswer]:
    settings: dict[str, object] = {
        "agent": program.agent,
        "adapter": program.adapter,
        "args": program.args,
        "paths": _paths(program),
    }

    def cannot_start(reason: str) -> ConfigError:
        return ConfigError(f"streams.{program.name}.agent: {program.agent!r} can't be run: {reason}")

    return LineProgram(
        program.name,
        [
            *(sys.executable, "-S", "-E", str(_LEASH_FILE), str(os.getpid())),
            # -P: the file's own folder must not shadow the user's modules.
            *(program.python or sys.executable, "-P", str(_PROCESS_FILE), msgspec.json.encode(settings).decode()),
        ],
        program.envs,
        greeting=_greeting,
        answer=_answer,
        died=_died,
        cannot_start=cannot_start,
        line_limit_bytes=LINE_LIMIT_BYTES,
        start_s=_START_S,
        restart_s=_RESTART_S,
    )


def _greeting(line: bytes) -> str:
    started = msgspec.json.decode(line, type=_Started)
    return "" if started.ready else started.failed or "it said nothing of being ready"


def _answer(line: bytes) -> tuple[str, AgentAnswer]:
    answer = msgspec.json.decode(line, type=AgentAnswer)
    return answer.id, answer


def _died(job: str, code: int | None) -> AgentAnswer:
    return AgentAnswer(end="died", id=job, error=f"the agent's process ended (code {code})")


def _paths(program: AgentProgram) -> Sequence[str]:
    """Where the agent's modules are: as this process sees them, or the working folder for another interpreter."""
    return [str(Path.cwd())] if program.python else [path or str(Path.cwd()) for path in sys.path]
