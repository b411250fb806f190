"""The rest of what agents and Arenas are promised: token limits by every name, the free token, typed overflows inside streams, slow readers."""

import anyio
import anyio.lowlevel
import msgspec
import pytest
from gateway_fakes import TOKENIZER, FakeEngine, chunk_of, house

from schemas.messages.rollout import FinishReason
from stages.gateway.http import GatewayApp
from stages.gateway.settings import GatewayLimits, RunSampling
from stages.ports import ContextOverflowError

MESSAGES = [{"role": "user", "content": "hello"}]
PATHS = {
    "chat": ("/v1/chat/completions", {"messages": MESSAGES}),
    "text": ("/v1/completions", {"prompt": "hello"}),
    "responses": ("/v1/responses", {"input": "hello"}),
    "messages": ("/v1/messages", {"messages": MESSAGES}),
}


async def opened(home, session="s"):
    return (await home.gateway.open_session(session)).token


async def ask(home, token, protocol, **fields):
    path, body = PATHS[protocol]
    async with home.http(token) as client:
        return await client.post(
            path, json={"model": "m", **({"max_tokens": 9} if protocol == "messages" else {}), **body, **fields}
        )


@pytest.mark.parametrize(
    ("protocol", "field"),
    [
        ("chat", "max_tokens"),
        ("chat", "max_completion_tokens"),
        ("text", "max_tokens"),
        ("responses", "max_output_tokens"),
        ("messages", "max_tokens"),
    ],
)
async def test_a_token_limit_holds_under_each_of_its_names(protocol, field):
    home = house()
    assert (await ask(home, await opened(home), protocol, **{field: 7})).status_code == 200
    assert home.engine.requests[0].settings.max_new_tokens == 7


@pytest.mark.parametrize("protocol", list(PATHS))
async def test_prompt_and_answer_leave_one_token_of_the_context_free(protocol):
    home = house(FakeEngine(["word " * 100]), context_length=64, sampling=RunSampling(max_new_tokens=10_000))
    fields = {"max_tokens": 10_000} if protocol in ("messages", "text") else {}  # "text" has a default of its own
    assert (await ask(home, await opened(home), protocol, **fields)).status_code == 200
    request = home.engine.requests[0]
    assert request.prompt_ids.size + request.settings.max_new_tokens == 63


@pytest.mark.parametrize(
    ("protocol", "signs"),
    [
        ("chat", ['"code":"context_length_exceeded"']),
        ("text", ['"code":"context_length_exceeded"']),
        ("responses", ["event: response.failed", '"code":"context_length_exceeded"']),
        ("messages", ["event: error", "prompt is too long"]),
    ],
)
async def test_an_overflow_inside_a_stream_is_typed_too(protocol, signs):
    class Overflowing(FakeEngine):
        async def generate(self, request):
            yield chunk_of(TOKENIZER.encode("half"))
            for _ in range(20):
                await anyio.lowlevel.checkpoint()
            raise ContextOverflowError("no room")

    home = house(Overflowing())
    answer = await ask(home, await opened(home), protocol, stream=True)
    assert answer.status_code == 200
    assert "half" in answer.text
    assert [sign for sign in signs if sign not in answer.text] == []
    closed = await home.gateway.close_session("s")
    assert (closed.num_interactions, closed.context_overflow, closed.system_error) == (0, True, "")


async def test_a_generation_key_can_neither_open_reward_nor_end_a_session():
    home = house(control_key="ctl", generation_keys=("gen",))
    await home.gateway.open_session("s")
    async with home.http("gen") as client:
        for path in ("/v1/sessions", "/v1/sessions/s/reward", "/v1/sessions/s/close"):
            assert (await client.post(path, json={"score": 1.0})).status_code == 403
        assert (await client.get("/v1/sessions/s")).status_code == 403


async def test_with_tool_choice_none_an_answer_is_not_read_for_calls():
    call = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
    home = house(FakeEngine([call]))
    token = await opened(home)
    said = (await ask(home, token, "chat", tools=tools)).json()["choices"][0]
    assert (said["finish_reason"], said["message"]["tool_calls"][0]["function"]["name"]) == ("tool_calls", "look")
    said = (await ask(home, token, "chat", tools=tools, tool_choice="none")).json()["choices"][0]
    assert (said["finish_reason"], said["message"]["content"]) == ("stop", call)


async def test_a_client_that_reads_slowly_holds_up_sampling_instead_of_filling_memory():
    class Endless(FakeEngine):
        given = 0

        async def generate(self, request):
            for number in range(1000):
                self.given += 1
                last = number == 999
                yield chunk_of(TOKENIZER.encode("x" * 4000), finish=FinishReason.STOP if last else None)

    home = house(Endless(), context_length=10**8, sampling=RunSampling(max_new_tokens=10**7))
    token = await opened(home)
    body = msgspec.json.encode({"messages": MESSAGES, "stream": True, "max_tokens": 10**7})
    pending = [{"type": "http.request", "body": body, "more_body": False}]
    stuck, gone = anyio.Event(), anyio.Event()

    async def receive():
        if pending:
            return pending.pop()
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message):
        if message["type"] == "http.response.body":
            stuck.set()
            await anyio.Event().wait()

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/chat/completions",
        "query_string": b"",
        "headers": [(b"authorization", f"Bearer {token}".encode())],
    }
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(GatewayApp(home.gateway), scope, receive, send)
        with anyio.fail_after(10):
            await stuck.wait()
        for _ in range(200):
            await anyio.lowlevel.checkpoint()
        assert home.engine.given < 100
        gone.set()


async def test_a_fast_gateway_holds_answers_up_when_its_backlog_is_full():
    home = house(recording="fast", limits=GatewayLimits(fast_backlog=8))
    token = await opened(home)
    done = []

    async def call():
        done.append((await ask(home, token, "chat")).status_code)

    async with anyio.create_task_group() as tasks:
        await tasks.start(home.gateway._writer.run)
        home.recorder.gate = anyio.Event()
        async with anyio.create_task_group() as calls:
            for _ in range(20):
                calls.start_soon(call)
            for _ in range(500):
                await anyio.lowlevel.checkpoint()
            assert len(done) < 20
            home.recorder.gate.set()
        assert done == [200] * 20
        tasks.cancel_scope.cancel()
