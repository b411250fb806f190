"""One process of an agent pool: plays many episodes at a time in one event loop. Run by path; imports the standard library only.

    stdin   {"id", "play": {task, base_url, api_key, session}} · {"id", "cancel": true} · {"id", "rows": true}
    stdout  {"ready": true} or {"failed": why}, then {"id", "end", …} for each id; what the agent prints goes to stderr

So any interpreter can play agents, also one with packages that this project can't be installed beside. Knows no gateway, no
status and no reward mapping: who reads the answers decides what they mean.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import importlib.util
import inspect
import json
import math
import os
import signal
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import Any, Final, Protocol

LINE_LIMIT_BYTES: Final = 64 * 1024 * 1024
_CANCEL_S: Final = 5.0
_ERROR_LIMIT: Final = 2000


class Player(Protocol):
    """What plays episodes in here."""

    async def play(self, task: object, *, base_url: str, api_key: str, session: str) -> object:
        """One episode: its reward, or a reward per completion id."""
        ...

    def rows(self, limit: int) -> list[dict[str, object]]:
        """Its own tasks, each with `id`, `prompt` and `tags`; 0 = all."""
        ...


class AgentTimeoutError(Exception):
    """An episode ran out of a time limit of its own: as if it had run out of the pool's."""


class FunctionPlayer:
    """The user's own async function."""

    def __init__(self, path: str, args: Mapping[str, Any]) -> None:  # Any: keyword arguments of a user's function
        module, _, name = path.partition(":")
        found = getattr(importlib.import_module(module), name)
        if not inspect.iscoroutinefunction(found):
            raise TypeError(f"{path} is {type(found).__name__}, expected an async function")
        inspect.signature(found).bind(None, base_url="", api_key="", session="", **args)
        self._agent: Final[Callable[..., Awaitable[object]]] = found
        self._args: Final = dict(args)

    async def play(self, task: object, *, base_url: str, api_key: str, session: str) -> object:
        return await self._agent(task, base_url=base_url, api_key=api_key, session=session, **self._args)

    def rows(self, limit: int) -> list[dict[str, object]]:
        raise TypeError(f"a function has no rows of its own (asked for {limit})")


def reward_of(value: object) -> dict[str, object]:
    """The part of an answer that holds a returned reward.

    Raises:
        ValueError: It is neither a finite number nor a non-empty map of completion ids to finite numbers.
    """
    if isinstance(value, Mapping):
        if not value:
            raise ValueError("expected a reward for at least one completion id, found an empty map")
        return {"rewards": {_completion_id(key): _finite(number) for key, number in value.items()}}
    return {"reward": _finite(value)}


def _completion_id(key: object) -> str:
    if not isinstance(key, str) or not key:
        raise ValueError(f"expected completion ids as keys, found {key!r}")
    return key


def _finite(value: object) -> float:
    try:
        number = float(value)  # pyright: ignore[reportArgumentType] - whatever a user returned, numpy scalars included
    except (TypeError, ValueError) as error:
        raise ValueError(f"expected a number or a map of completion ids to numbers, found {value!r:.200}") from error
    if not math.isfinite(number):
        raise ValueError(f"expected a finite reward, found {number}")
    return number


async def _serve(player: Player, lines: asyncio.StreamReader, say: Callable[[dict[str, object]], None]) -> None:
    playing: dict[str, asyncio.Task[None]] = {}

    async def play(job: str, arguments: dict[str, Any]) -> None:  # Any: JSON
        api_key = str(arguments["api_key"])
        try:
            answer: dict[str, object] = {"end": "returned", **reward_of(await player.play(**arguments))}
        except asyncio.CancelledError:
            answer = {"end": "cancelled"}
        except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever an agent raises is its episode's end
            kind = "timeout" if isinstance(error, AgentTimeoutError) else "failed"
            text = f"{type(error).__name__}: {error}".replace(api_key, "***") if api_key else repr(error)
            answer = {"end": kind, "error": text[:_ERROR_LIMIT]}
        say({"id": job, **answer})

    while line := await lines.readline():
        order = json.loads(line)
        job = order["id"]
        if "play" in order:
            playing[job] = asyncio.create_task(play(job, order["play"]))
            playing[job].add_done_callback(lambda _task, job=job: playing.pop(job, None))
        elif "rows" in order:
            say({"id": job, "end": "rows", "rows": await asyncio.to_thread(player.rows, int(order["rows"]))})
        elif job in playing:
            playing[job].cancel()
    for task in list(playing.values()):
        task.cancel()
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(asyncio.gather(*playing.values(), return_exceptions=True), _CANCEL_S)


@contextlib.asynccontextmanager
async def _open_player(settings: Mapping[str, Any]) -> AsyncGenerator[Player]:  # Any: JSON
    if not settings["adapter"]:
        yield FunctionPlayer(settings["agent"], settings["args"])
        return
    spec = importlib.util.spec_from_file_location("headrace_agent_adapter", settings["adapter"])
    if spec is None or spec.loader is None:
        raise ImportError(f"{settings['adapter']} can't be loaded")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    async with module.open_player(settings["agent"], settings["args"], AgentTimeoutError) as player:
        yield player


async def _main(settings: Mapping[str, Any], output: int) -> int:  # Any: JSON
    def say(answer: dict[str, object]) -> None:
        data = json.dumps(answer).encode() + b"\n"
        while data:
            data = data[os.write(output, data) :]

    loop = asyncio.get_running_loop()
    main = asyncio.current_task()
    if main is not None:
        loop.add_signal_handler(signal.SIGTERM, main.cancel)
    lines = asyncio.StreamReader(limit=LINE_LIMIT_BYTES)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    try:
        async with contextlib.AsyncExitStack() as stack:
            try:
                player = await stack.enter_async_context(_open_player(settings))
            except Exception as error:  # noqa: BLE001 - importing a user's module may raise anything; it is told and ends the pool
                say({"failed": f"{type(error).__name__}: {error}"[:_ERROR_LIMIT]})
                return 1
            say({"ready": True})
            await _serve(player, lines, say)
    except asyncio.CancelledError:
        return 128 + signal.SIGTERM
    return 0


def main() -> int:
    """Serve until standard input ends; the exit code."""
    settings = json.loads(sys.argv[1])
    sys.path[:0] = settings["paths"]
    # The agent's own prints must not get among the answers.
    output = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return asyncio.run(_main(settings, output))


if __name__ == "__main__":
    sys.exit(main())
