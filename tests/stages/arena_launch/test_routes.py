"""The three routes, against a real local Arena and a chat endpoint that knows keys and sessions like our gateway."""

import asyncio
import contextlib

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route as HttpRoute
from waiting import wait_until

from ops.arena.config import ArenaServerConfig, HarnessKind, HarnessSpec, StreamSpec
from ops.arena.server import ArenaSecrets, serve
from schemas.config_arena import ArenaRoute, StreamConfig
from schemas.messages.rollout import EpisodeLaunched
from stages.arena_launch.ports import SessionTicket
from stages.arena_launch.routes import make_route, with_headers
from stages.clients.arena.client import ArenaAccess, Launch, open_arena
from stages.clients.arena.registration import RegistrationCounts, Registrations, RegistrationSettings
from stages.clients.arena.secret import Secret

GENERATION_KEY, TOKEN = "generation-key", "session-token"
STREAM = StreamSpec(stream_id="sums", dataset="chain_sum", size=4, harness="openai-loop@1")
HARNESSES = (
    HarnessSpec(key="openai-loop", kind=HarnessKind.OPENAI_LOOP),
    HarnessSpec(key="claude-loop", kind=HarnessKind.ANTHROPIC_LOOP),
)


class QuickServer(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self):
        yield

    async def main_loop(self) -> None:
        while not self.should_exit:
            await asyncio.sleep(0.002)


class Gateway:
    """Accepts a session's token as key, or the generation key with the session's headers."""

    def __init__(self) -> None:
        self.url = ""
        self.sessions: list[str] = []

    async def chat(self, request: Request) -> JSONResponse:
        key = request.headers.get("authorization", request.headers.get("x-api-key", "")).removeprefix("Bearer ")
        by_headers = key == GENERATION_KEY and request.headers.get("x-session-token") == TOKEN
        if key != TOKEN and not by_headers:
            return JSONResponse({"error": {"message": "who are you?"}}, 401)
        self.sessions.append(request.headers.get("x-session-id", "by token"))
        text = {"role": "assistant", "content": "1"}
        content = [{"type": "text", "text": "1"}]
        return JSONResponse({"id": "c", "choices": [{"message": text, "finish_reason": "stop"}], "content": content})


@pytest.fixture
async def gateway():
    fake = Gateway()
    routes = [HttpRoute(path, fake.chat, methods=["POST"]) for path in ("/v1/chat/completions", "/v1/messages")]
    server = QuickServer(
        uvicorn.Config(
            Starlette(routes=routes), port=0, log_config=None, lifespan="off", ws="none", timeout_graceful_shutdown=1
        )
    )
    task = asyncio.create_task(server.serve())
    await wait_until(lambda: server.started)
    fake.url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    yield fake
    server.should_exit = server.force_exit = True
    await task


@pytest.fixture
async def client():
    config = ArenaServerConfig(streams=(STREAM,), harnesses=HARNESSES, pool_processes=1)
    ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    secrets = ArenaSecrets(openapi_token="t", llm_api_key="arena-key")
    task = asyncio.create_task(serve(config, ready=ready.set_result, secrets=secrets))
    access = ArenaAccess(base_url=await ready, token=Secret("t"), llm_api_key=Secret("arena-key"))
    async with open_arena(access) as opened:
        yield opened
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


@pytest.fixture
async def registrations(client):
    registrations = Registrations(client, RegistrationSettings(run_label="run-1"), RegistrationCounts())
    yield registrations
    await registrations.close()
    assert registrations.names == []


def _route(kind, registrations, client, *, worker="w"):
    return make_route(
        kind, registrations, client.access, run_label="run-1", worker=worker, generation_key=Secret(GENERATION_KEY)
    )


def _ticket(gateway: Gateway) -> SessionTicket:
    return SessionTicket(session="g1-0-0-0", token=Secret(TOKEN), base_url=gateway.url)


async def _played(client, access, harness: str):
    launch = Launch(
        stream_id="sums",
        data_id="chain_sum-0-000000",
        model_name=access.model_name,
        base_url=access.base_url,
        api_key=access.api_key,
        envs=dict(access.envs),
        harness=harness,
    )
    launched = await client.launch(launch)

    async def result():
        found = await client.task_result(launched.task_id)
        return found if found.terminal else None

    return await wait_until(result, launched.task_id, every_s=0.02)


@pytest.mark.parametrize("harness", ["openai-loop@1", "claude-loop@1"])
@pytest.mark.parametrize(
    ("kind", "seen"),
    [(ArenaRoute.SESSION_GATEWAY, "g1-0-0-0"), (ArenaRoute.GATEWAY, "by token"), (ArenaRoute.DIRECT, "by token")],
)
async def test_a_harness_reaches_its_session_by_every_route_and_protocol(
    gateway, client, registrations, kind, seen, harness
) -> None:
    route = _route(kind, registrations, client)
    stream = StreamConfig(name="sums", stream_id="sums", harness=harness)
    async with route.reach(stream, _ticket(gateway)) as access:
        assert (await _played(client, access, harness)).status == "DONE"
    assert gateway.sessions == [seen]
    assert route.name == kind.value
    assert len(registrations.names) == (1 if kind is ArenaRoute.SESSION_GATEWAY else 0)


async def test_sessions_of_one_gateway_share_its_registration(gateway, client, registrations) -> None:
    route = _route(ArenaRoute.SESSION_GATEWAY, registrations, client)
    stream = StreamConfig(name="sums", stream_id="sums")
    async with route.reach(stream, _ticket(gateway)) as first, route.reach(stream, _ticket(gateway)) as second:
        assert first.model_name == second.model_name
    assert registrations.counts.registered == 1


async def test_what_a_killed_worker_registered_is_restored_for_the_tasks_that_are_taken_over(
    gateway, client, registrations
) -> None:
    route = _route(ArenaRoute.SESSION_GATEWAY, registrations, client)
    route.know(gateway.url)
    name = route.model_name(gateway.url)
    launched = EpisodeLaunched(
        group="g1", slot=0, attempt=0, launch_try=0, session="g1-0-0-0", route=route.name, model_name=name
    )
    async with route.resume(launched):
        assert await client.get_model(name) is not None
    assert registrations.counts.restored == 1


async def test_a_task_of_a_killed_worker_that_another_takes_over_leaves_the_successor_its_registration(
    gateway, client, registrations
) -> None:
    stream = StreamConfig(name="sums", stream_id="sums")
    successor = _route(ArenaRoute.SESSION_GATEWAY, registrations, client, worker="launch.1")
    async with successor.reach(stream, _ticket(gateway)) as access:
        launched = EpisodeLaunched(
            group="g1", slot=0, attempt=0, launch_try=0, session="g1-0-0-0", model_name=access.model_name
        )
        others = Registrations(client, RegistrationSettings(run_label="run-1"), RegistrationCounts())
        taking_over = _route(ArenaRoute.SESSION_GATEWAY, others, client, worker="launch.0")
        taking_over.know(gateway.url)
        async with taking_over.resume(launched):
            pass
        await others.close()
        assert await client.get_model(access.model_name) is not None
        assert (await _played(client, access, "openai-loop@1")).status == "DONE"


async def test_a_former_tries_own_registration_is_forgotten_and_a_shared_one_kept(
    gateway, client, registrations
) -> None:
    stream = StreamConfig(name="sums", stream_id="sums")
    own = _route(ArenaRoute.GATEWAY, registrations, client)
    async with own.reach(stream, _ticket(gateway)) as access:
        endpoint = registrations._entries[access.model_name].endpoint
    await client.register_model(access.model_name, endpoint, deployment_id="run-1")
    launched = EpisodeLaunched(
        group="g1", slot=0, attempt=0, launch_try=0, session="g1-0-0-0", model_name=access.model_name
    )
    await own.forget(launched)
    assert await client.get_model(access.model_name) is None
    await _route(ArenaRoute.SESSION_GATEWAY, registrations, client).forget(launched)
    await _route(ArenaRoute.DIRECT, registrations, client).forget(launched)


async def test_the_direct_route_keeps_the_users_no_proxy_and_adds_our_host(gateway, client, registrations) -> None:
    stream = StreamConfig(name="sums", stream_id="sums", task_envs={"NO_PROXY": "internal", "OTHER": "kept"})
    async with _route(ArenaRoute.DIRECT, registrations, client).reach(stream, _ticket(gateway)) as access:
        assert access.envs["NO_PROXY"] == access.envs["no_proxy"] == "internal,127.0.0.1"
        assert access.envs["OTHER"] == "kept"
        assert (access.envs["OPENAI_BASE_URL"], access.envs["ANTHROPIC_BASE_URL"]) == (f"{gateway.url}/v1", gateway.url)
    assert TOKEN not in repr(access)


def test_the_users_own_custom_headers_are_kept_before_ours() -> None:
    envs = with_headers({"A": "X-Mine: 1\n", "C": "c"}, {"A": "X-Session-Id: s", "B": "X-Session-Id: s"})
    assert envs == {"A": "X-Mine: 1\nX-Session-Id: s", "B": "X-Session-Id: s", "C": "c"}
