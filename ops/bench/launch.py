"""`headrace bench launch`: thousands of episodes watched by one process, over real HTTP.

The launch stage runs as it does in a run; its Arena is a bare server in a process of its own, whose tasks end after a fixed time;
sessions and the log are in memory. Reference: how many polls a bare aiohttp client makes per core-second, beside the stage's client.
"""

from __future__ import annotations

import asyncio
import resource
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager

import aiohttp
import anyio
import anyio.lowlevel

from ops.bench.result import BenchResult, machine
from pipeline.metrics import Metrics
from schemas.config_arena import ArenaSettings, StreamConfig, StreamRunner
from schemas.messages.rollout import EpisodeAccepted, EpisodeEnded, EpisodeLaunched, SessionClosed
from schemas.messages.sampling import EpisodeRequested
from stages.arena_launch.arena_runner import ArenaRunner
from stages.arena_launch.groups import ClosedGroups
from stages.arena_launch.polling import Pace
from stages.arena_launch.ports import LaunchTry, SessionTicket
from stages.arena_launch.routes import DirectRoute
from stages.arena_launch.stage import LaunchSettings, launch_episode
from stages.clients.arena.client import ArenaAccess, ArenaClient, open_arena
from stages.clients.arena.secret import Secret

EPISODES = 5000
EPISODE_S = 60.0
_REFERENCE_POLLS = 2000
_AT_ONCE = 32


class _Memory:
    """Sessions and log of the benchmark: nothing outside."""

    async def serves(self, version: int) -> bool:
        """Nothing is trained."""
        return version == 0

    async def open(self, session: str, *, min_version: int) -> SessionTicket:
        return SessionTicket(session=session, token=Secret(f"{session}-{min_version}"), base_url="http://127.0.0.1:9")

    async def close(self, session: str) -> SessionClosed:
        return SessionClosed(session=session, num_interactions=1)

    async def tries(self, requested: EpisodeRequested) -> list[LaunchTry]:
        del requested
        return []

    async def record(self, message: EpisodeLaunched | EpisodeAccepted) -> None:
        await anyio.lowlevel.checkpoint()
        del message


def run(num_episodes: int = EPISODES, episode_s: float = EPISODE_S) -> BenchResult:
    """Watch that many episodes of that length at once."""
    return asyncio.run(_run(num_episodes, episode_s))


async def _run(num_episodes: int, episode_s: float) -> BenchResult:
    with _arena(episode_s) as url:
        access = ArenaAccess(base_url=url, token=Secret("t"), llm_api_key=Secret("k"))
        async with open_arena(access) as client:
            ours_per_core_s = await _polls_per_core_s(client)
            bare_per_core_s = await _bare_polls_per_core_s(url)
            pace = Pace(ArenaSettings().poll_interval_s)
            ends: Counter[str] = Counter()
            wall_s, cpu_s = time.perf_counter(), time.process_time()
            await _watch_all(num_episodes, client, pace, ends)
            wall_s, cpu_s = time.perf_counter() - wall_s, time.process_time() - cpu_s
    metrics: dict[str, float | str] = {
        "episodes": num_episodes,
        "episode_s": episode_s,
        "scored": ends["scored"],
        "wall_s": round(wall_s, 2),
        "cores": round(cpu_s / wall_s, 3),
        "peak_rss_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1),
        "polls": len(pace.lateness_s),
        "poll_lateness_p99_s": round(pace.lateness_p99_s(), 3),
        "polls_per_core_s": round(ours_per_core_s),
    }
    reference: dict[str, float | str] = {"polls_per_core_s": round(bare_per_core_s)}
    ratio = {"polls_per_core_s": round(ours_per_core_s / bare_per_core_s, 3)}
    return BenchResult(name="launch", metrics=metrics, reference=reference, ratio=ratio, machine=machine())


async def _watch_all(num_episodes: int, client: ArenaClient, pace: Pace, ends: Counter[str]) -> None:
    settings = LaunchSettings(streams={"s": StreamConfig(name="s", stream_id="s")}, arena=ArenaSettings(), attempts=1)
    memory, groups, metrics = _Memory(), ClosedGroups(), Metrics("bench", "arena_launch")
    runners = {StreamRunner.ARENA: ArenaRunner(client, DirectRoute(), settings.arena, pace=pace)}

    async def episode(number: int) -> None:
        group = f"g{number // 8:07d}"
        requested = EpisodeRequested(group=group, slot=number % 8, attempt=0, stream="s", data_id=str(number))
        ended = await launch_episode(
            requested,
            launches=memory,
            sessions=memory,
            runners=runners,
            settings=settings,
            metrics=metrics,
            groups=groups,
        )
        ends.update(end.outcome.value for end in ended if isinstance(end, EpisodeEnded))

    async with anyio.create_task_group() as tasks:
        for number in range(num_episodes):
            tasks.start_soon(episode, number)


async def _polls_per_core_s(client: ArenaClient) -> float:
    async def poll(_number: int) -> None:
        await client.task_result("task-0")

    return await _rate(poll)


async def _bare_polls_per_core_s(url: str) -> float:
    async with aiohttp.ClientSession() as http:

        async def poll(_number: int) -> None:
            async with http.get(f"{url}/openapi/v1/tasks/task-0/result") as answer:
                await answer.json()

        return await _rate(poll)


async def _rate(poll: Callable[[int], Awaitable[None]]) -> float:
    started_s = time.process_time()
    limiter = anyio.CapacityLimiter(_AT_ONCE)

    async def one(number: int) -> None:
        async with limiter:
            await poll(number)

    async with anyio.create_task_group() as tasks:
        for number in range(_REFERENCE_POLLS):
            tasks.start_soon(one, number)
    return _REFERENCE_POLLS / (time.process_time() - started_s)


@contextmanager
def _arena(episode_s: float) -> Generator[str]:
    command = [sys.executable, "-m", "ops.bench.launch_arena", str(episode_s)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True) as server:  # noqa: S603 - our own module
        try:
            yield (server.stdout.readline() if server.stdout is not None else "").strip()
        finally:
            server.terminate()
