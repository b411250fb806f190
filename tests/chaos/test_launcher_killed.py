"""kill -9 of the launch worker with 200 episodes in flight: one counted result per slot, few extra launches, each reported."""

import asyncio
import sys
from collections import Counter
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from broker.connect import connect
from broker.embedded import EmbeddedServer
from ops.arena.config import ArenaServerConfig, CallFault, CallName, FaultPlan, HarnessKind, HarnessSpec, StreamSpec
from ops.arena.server import ArenaSecrets, serve
from pipeline.log import RunLog
from schemas.messages.rollout import EpisodeClass
from schemas.messages.sampling import EpisodeRequested
from schemas.topics import EPISODE_ACCEPTED, EPISODE_ENDED, EPISODE_LAUNCHED
from stages.arena_launch.polling import LAUNCHES_AT_ONCE

EPISODES = 200
HARNESS = HarnessSpec(key="loop", kind=HarnessKind.OPENAI_LOOP)
STREAM = StreamSpec(stream_id="sums", dataset="chain_sum", size=EPISODES, harness="loop@1")
SLOW_POST = CallFault(call=CallName.LAUNCH, kind="delay", delay_s=0.2)


@pytest.fixture
async def arena():
    config = ArenaServerConfig(
        streams=(STREAM,), harnesses=(HARNESS,), pool_processes=1, faults=FaultPlan(calls=(SLOW_POST,))
    )
    ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    secrets = ArenaSecrets(openapi_token="control", llm_api_key="gateway")
    task = asyncio.create_task(serve(config, ready=ready.set_result, secrets=secrets))
    yield await ready
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


class HoldingGateway:
    """Keeps every model call waiting until released."""

    def __init__(self) -> None:
        self.released = asyncio.Event()
        self.sessions: Counter[str] = Counter()
        self.url = ""

    async def chat(self, request: web.Request) -> web.Response:
        assert request.headers["Authorization"] == "Bearer generation"
        await self.released.wait()
        self.sessions[request.headers["X-Session-Id"]] += 1
        choices = [{"index": 0, "message": {"role": "assistant", "content": "1"}, "finish_reason": "stop"}]
        return web.json_response({"id": "c", "choices": choices})


@pytest.fixture
async def gateway():
    fake = HoldingGateway()
    app = web.Application()
    app.router.add_post("/v1/chat/completions", fake.chat)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    fake.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield fake
    await runner.cleanup()


async def _launcher(server: EmbeddedServer, arena: str, gateway: str) -> asyncio.subprocess.Process:
    script = str(Path(__file__).parent / "launcher_process.py")
    return await asyncio.create_subprocess_exec(
        sys.executable, script, server.url, str(server.token_file), arena, gateway
    )


async def _read(log: RunLog, topic) -> list:
    async with log.read([topic], follow=False) as entries:
        return [entry.message async for entry in entries]


async def test_a_killed_launcher_leaves_one_counted_result_per_slot(tmp_path, arena, gateway, wait_until) -> None:
    server = EmbeddedServer(tmp_path / "nats")
    await server.start()
    settings = server.connect_settings()
    try:
        async with connect(server.url, "chaos", settings, create=True) as broker, aiohttp.ClientSession() as http:
            log = RunLog(broker)

            async def ask(path: str):
                headers = {"Authorization": "Bearer control"}
                async with http.get(f"{arena}/openapi/v1{path}", headers=headers) as answer:
                    return answer.status, await answer.json()

            async def num_tasks() -> int:
                return (await ask("/streams/sums/tasks?limit=1"))[1]["total"]

            for number in range(EPISODES):
                data_id = f"chain_sum-0-{number:06d}"
                await log.publish(
                    EpisodeRequested(
                        group=f"g{number // 8:07d}", slot=number % 8, attempt=0, stream="s", data_id=data_id
                    )
                )

            first = await _launcher(server, arena, gateway.url)

            async def half_launched() -> bool:
                return await num_tasks() >= EPISODES // 2

            await wait_until(half_launched, deadline_s=150)
            first.kill()
            await first.wait()

            second = await _launcher(server, arena, gateway.url)

            async def all_accepted() -> bool:
                return len(await _read(log, EPISODE_ACCEPTED)) >= EPISODES

            await wait_until(all_accepted, deadline_s=90)
            gateway.released.set()

            async def all_ended() -> bool:
                return len(await _read(log, EPISODE_ENDED)) >= EPISODES

            await wait_until(all_ended, deadline_s=150)
            second.terminate()
            assert await second.wait() == 0

            ended = await _read(log, EPISODE_ENDED)
            assert Counter((end.group, end.slot) for end in ended).most_common(1)[0][1] == 1
            assert len(ended) == EPISODES
            assert {(end.outcome, end.final, end.attempt) for end in ended} == {(EpisodeClass.SCORED, True, 0)}

            launched = await _read(log, EPISODE_LAUNCHED)
            reported = sum(try_.launch_try > 0 for try_ in launched)
            extra = await num_tasks() - EPISODES
            assert 0 <= extra <= reported <= LAUNCHES_AT_ONCE
            sessions = Counter(end.session for end in ended)
            assert max(sessions.values()) == 1
            for name in {try_.model_name for try_ in launched}:
                assert (await ask(f"/llm/models/{name}"))[0] == 404
    finally:
        await server.stop()
