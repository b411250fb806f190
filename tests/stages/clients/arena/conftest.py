"""A real local Arena over HTTP, a chat endpoint that can add, and a client that doesn't wait between tries."""

import asyncio
import contextlib
import re
from collections.abc import AsyncGenerator, Awaitable, Callable

import msgspec
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from waiting import wait_until

from ops.arena.config import ArenaServerConfig, HarnessKind, HarnessSpec, StreamSpec
from ops.arena.server import ArenaSecrets, serve
from stages.clients.arena.client import ArenaAccess, ArenaClient, Launch, ModelEndpoint, open_arena
from stages.clients.arena.secret import Secret

TOKEN, LLM_KEY, UPSTREAM_KEY = "marked-openapi-token", "marked-llm-key", "marked-upstream-key"

HARNESSES = (
    HarnessSpec(key="openai-loop", kind=HarnessKind.OPENAI_LOOP, max_tokens=8),
    HarnessSpec(key="openai-two-turn", kind=HarnessKind.OPENAI_TWO_TURN, max_tokens=8),
    HarnessSpec(key="claude-loop", kind=HarnessKind.ANTHROPIC_LOOP, max_tokens=8),
    HarnessSpec(key="codex-loop", kind=HarnessKind.RESPONSES_LOOP, max_tokens=8),
    HarnessSpec(key="scripted", kind=HarnessKind.SCRIPTED),
    HarnessSpec(key="retired", kind=HarnessKind.SCRIPTED, status="RETIRED"),
)
STREAM = StreamSpec(
    stream_id="words",
    dataset="chain_sum",
    dataset_options={"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
    size=40,
    turns=("add {expression}", "check {expression} = {reply}"),
    harness="scripted@1",
)


class Upstream:
    """A chat endpoint like our gateway's: it knows one key and adds what the last message asks for."""

    def __init__(self) -> None:
        self.url = ""
        self.calls: list[dict[str, object]] = []
        self.headers: list[dict[str, str]] = []
        self.refuse: tuple[int, dict[str, object]] | None = None

    async def chat(self, request: Request) -> JSONResponse:
        if request.headers.get("authorization") != f"Bearer {UPSTREAM_KEY}":
            return JSONResponse({"error": {"message": "wrong key", "type": "invalid_request_error", "code": None}}, 401)
        self.calls.append(await request.json())
        self.headers.append(dict(request.headers))
        if self.refuse is not None:
            status, body = self.refuse
            return JSONResponse(body, status)
        terms = re.search(r"(\d+) ([+-]) (\d+)", self.calls[-1]["messages"][-1]["content"])
        answer = "pong"
        if terms:
            answer = str(int(terms[1]) + int(terms[2] + terms[3]))
        message = {"role": "assistant", "content": answer}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        usage = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
        return JSONResponse(
            {"id": f"c{len(self.calls)}", "object": "chat.completion", "choices": [choice], "usage": usage}
        )


class QuietServer(uvicorn.Server):
    async def main_loop(self) -> None:
        await self.on_tick(0)
        while not self.should_exit:
            await asyncio.sleep(0.002)

    @contextlib.contextmanager
    def capture_signals(self):
        yield


@contextlib.asynccontextmanager
async def listening(app: Starlette) -> AsyncGenerator[str]:
    server = QuietServer(
        uvicorn.Config(app, port=0, log_config=None, lifespan="off", ws="none", timeout_graceful_shutdown=1)
    )
    task = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = server.force_exit = True
        await task


@pytest.fixture
async def serve_app():
    """Serves any app on loopback until the test ends."""
    async with contextlib.AsyncExitStack() as stack:
        yield lambda app: stack.enter_async_context(listening(app))


@pytest.fixture
async def upstream():
    fake = Upstream()
    async with listening(Starlette(routes=[Route("/v1/chat/completions", fake.chat, methods=["POST"])])) as url:
        fake.url = f"{url}/v1"
        yield fake


@pytest.fixture
async def start_arena():
    """Starts local Arenas with the given settings; all end with the test."""
    running: list[asyncio.Task[None]] = []

    async def start(**settings: object) -> str:
        config = ArenaServerConfig(
            **{"streams": (STREAM,), "harnesses": HARNESSES, "pool_processes": 1, **settings},
        )
        ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        secrets = ArenaSecrets(openapi_token=TOKEN, llm_api_key=LLM_KEY)
        task = asyncio.create_task(serve(config, ready=ready.set_result, secrets=secrets))
        running.append(task)
        await asyncio.wait([task, ready], return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            await task
        return ready.result()

    yield start
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)


@pytest.fixture
async def open_client():
    """Clients whose sleeps are recorded in `client.slept` instead of waited for."""
    async with contextlib.AsyncExitStack() as stack:

        async def opened(url: str, **access: object) -> ArenaClient:
            slept: list[float] = []

            async def sleep(delay_s: float) -> None:
                slept.append(delay_s)

            settings = {"base_url": url, "token": Secret(TOKEN), "llm_api_key": Secret(LLM_KEY), **access}
            client = await stack.enter_async_context(open_arena(ArenaAccess(**settings), sleep=sleep))
            client.slept = slept
            return client

        yield opened


@pytest.fixture
def endpoint(upstream: Upstream) -> ModelEndpoint:
    return ModelEndpoint(endpoint_id="e1", upstream_model="policy", base_url=upstream.url, api_key=Secret(UPSTREAM_KEY))


@pytest.fixture
def launch_of() -> Callable[..., Launch]:
    def make(client: ArenaClient, data_id: str, **changes: object) -> Launch:
        fields = {
            "stream_id": "words",
            "data_id": data_id,
            "model_name": "stream-areal-session-0123456789abcdef",
            "base_url": client.access.gateway_url,
            "api_key": client.access.llm_api_key,
            "envs": {},
        }
        return Launch(**{**fields, **changes})

    return make


@pytest.fixture
def finished() -> Callable[..., Awaitable[msgspec.Struct]]:
    async def until_terminal(client: ArenaClient, task_id: str):
        async def result() -> msgspec.Struct | None:
            found = await client.task_result(task_id)
            return found if found.terminal else None

        return await wait_until(result, task_id, every_s=0.05)

    return until_terminal
