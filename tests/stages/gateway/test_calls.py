"""Calls of a session that wait, fail, are overridden or given up."""

import anyio
import httpx
import msgspec
import pytest
from gateway_fakes import CHAT, HELLO, TOKENIZER, FakeEngine, ask, chunk_of, house, served
from waiting import wait_until

from schemas.messages.rollout import FinishReason
from stages.gateway.errors import UnauthorizedError, UnavailableError
from stages.gateway.settings import GatewayLimits, OverridePolicy, RunSampling
from stages.ports import EngineUnavailableError


async def test_too_many_waiting_calls_are_told_to_come_back():
    engine = FakeEngine(gate=anyio.Event())
    home = house(engine, limits=GatewayLimits(max_running_calls=1, max_waiting_calls=1))
    ticket = await home.gateway.open_session("s")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ask, home, ticket.token)
        while not engine.started:
            await anyio.lowlevel.checkpoint()
        tasks.start_soon(ask, home, ticket.token)
        while not home.gateway._turns.statistics().tasks_waiting:
            await anyio.lowlevel.checkpoint()
        refused = await ask(home, ticket.token)
        engine.gate.set()
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
    assert len(home.recorder.interactions("s")) == 2


async def test_a_lost_engine_is_asked_again_with_what_is_left():
    home = house(FakeEngine([EngineUnavailableError("away"), "back"]), limits=GatewayLimits(resume_delay_s=0))
    ticket = await home.gateway.open_session("s")
    assert (await ask(home, ticket.token)).json()["choices"][0]["message"]["content"] == "back"


async def test_an_engine_that_stays_away_is_a_503_and_a_system_error():
    home = house(FakeEngine([EngineUnavailableError("away")]), limits=GatewayLimits(resume_delay_s=0, max_resumes=2))
    ticket = await home.gateway.open_session("s")
    response = await ask(home, ticket.token, HELLO, "/v1/messages")
    assert response.status_code == 503
    assert "away" in (await home.gateway.close_session("s")).system_error


@pytest.mark.parametrize("fault", [None, ZeroDivisionError()], ids=["of the engine", "of the gateway"])
@pytest.mark.parametrize(
    ("path", "sign"),
    [(CHAT, '"code":"{}"'), ("/v1/messages", "event: error"), ("/v1/responses", "response.failed")],
)
async def test_a_fault_amid_a_stream_is_told_in_the_stream(path, sign, fault):
    class Dying(FakeEngine):
        """Gives half an answer, is silent for a while, dies."""

        async def generate(self, request):
            yield chunk_of(TOKENIZER.encode("half"))
            for _ in range(20):
                await anyio.lowlevel.checkpoint()
            if fault is not None:
                raise fault

    home = house(Dying(), limits=GatewayLimits(resume_delay_s=0, max_resumes=0))
    ticket = await home.gateway.open_session("s")
    body = {"input": "x"} if path == "/v1/responses" else HELLO
    response = await ask(home, ticket.token, body | {"stream": True}, path)
    assert (response.status_code, "half" in response.text) == (200, True)
    assert sign.format("unavailable" if fault is None else "internal_error") in response.text
    assert ("ZeroDivisionError" in response.text) == (fault is not None)
    assert home.recorder.interactions("s") == []


async def test_the_runs_settings_rule_and_the_asked_ones_are_recorded():
    home = house(sampling=RunSampling(temperature=0.7, max_new_tokens=40))
    ticket = await home.gateway.open_session("s")
    asked = {"temperature": 0, "top_p": 0.5, "seed": 1, "max_completion_tokens": 30, "stop": "END"}
    await ask(home, ticket.token, HELLO | asked)
    settings = home.engine.requests[0].settings
    assert (settings.temperature, settings.top_p, settings.seed, settings.max_new_tokens) == (0.7, 1.0, None, 30)
    (record,) = home.recorder.interactions("s")
    assert (record.trainable, record.temperature) == (True, 0.7)
    kept = msgspec.json.decode(record.requested_settings_json)
    assert kept == {"temperature": 0.0, "top_p": 0.5, "seed": 1, "max_tokens": 30, "stop": ["END"]}


@pytest.mark.parametrize(
    ("asked", "reason"),
    [({"temperature": 0}, "greedy"), ({"top_k": 1}, "greedy"), ({"top_p": 0.9}, "settings"), ({"temperature": 0.5}, "settings"), ({}, ""),
     ({"repetition_penalty": 1.5}, "settings"), ({"presence_penalty": 0.5}, "settings"), ({"frequency_penalty": -1}, "settings"),
     ({"min_p": 0.1}, "settings"), ({"logit_bias": {"42": -100}}, "settings"), ({"seed": 3}, "settings"),
     ({"repetition_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0.0, "min_p": 0, "logit_bias": {}}, "")],
)  # fmt: skip
async def test_honoured_settings_that_change_the_distribution_keep_a_call_out_of_training(asked, reason):
    home = house(sampling=RunSampling(policy=OverridePolicy.HONOUR))
    ticket = await home.gateway.open_session("s")
    await ask(home, ticket.token, HELLO | asked)
    await ask(home, ticket.token, {"prompt": "hi"} | asked, "/v1/completions")
    for record in home.recorder.interactions("s"):
        assert (record.untrainable_reason, record.trainable) == (reason, not reason)


async def test_asked_penalties_and_biases_are_recorded_and_do_not_keep_a_call_out_of_training_by_default():
    home = house()
    ticket = await home.gateway.open_session("s")
    asked = {"repetition_penalty": 1.5, "min_p": 0.1, "logit_bias": {"42": -100.0}}
    await ask(home, ticket.token, HELLO | asked)
    (record,) = home.recorder.interactions("s")
    assert (record.trainable, msgspec.json.decode(record.requested_settings_json)) == (True, asked)


async def test_log_probs_that_are_no_numbers_keep_a_call_out_of_training():
    home = house(FakeEngine([[chunk_of([40, 41], logprobs=[-1, float("nan")], finish=FinishReason.STOP)]]))
    ticket = await home.gateway.open_session("s")
    assert (await ask(home, ticket.token)).status_code == 200
    (record,) = home.recorder.interactions("s")
    assert record.untrainable_reason == "logprobs"
    (tokens,) = await home.tokens("s")
    assert tokens.logprobs.as_numpy().tolist() == [-1, 0]


async def test_preprocessors_run_once_for_every_protocol():
    runs: list[str] = []

    def stamp(call):
        runs.append(call.protocol)
        message = msgspec.structs.replace(call.messages[-1], texts=(*call.messages[-1].texts, "[stamp]"))
        return msgspec.structs.replace(call, messages=(*call.messages[:-1], message))

    home = house(preprocessors=[stamp])
    ticket = await home.gateway.open_session("s")
    for path, body in ((CHAT, HELLO), ("/v1/messages", HELLO | {"max_tokens": 9}), ("/v1/responses", {"input": "hi"})):
        await ask(home, ticket.token, body, path)
        assert TOKENIZER.show(home.engine.requests[-1].prompt_ids).count("[stamp]") == 1
    assert runs == ["chat_completions", "messages", "responses"]


async def test_a_client_that_goes_away_aborts_its_request():
    engine = FakeEngine(gate=anyio.Event())
    home = house(engine)
    ticket = await home.gateway.open_session("s")
    async with served(home) as url, anyio.create_task_group() as tasks:

        async def call():
            async with httpx.AsyncClient(base_url=url) as client:
                await client.post(CHAT, json=HELLO, headers={"authorization": f"Bearer {ticket.token}"})

        tasks.start_soon(call)
        await wait_until(lambda: engine.started)
        tasks.cancel_scope.cancel()
        with anyio.CancelScope(shield=True):
            await wait_until(lambda: engine.closed)
    assert home.recorder.interactions("s") == []


@pytest.mark.parametrize(
    ("path", "ping"), [(CHAT, ": ping"), ("/v1/messages", "event: ping"), ("/v1/responses", "event: ping")]
)
async def test_a_silent_stream_is_kept_alive(path, ping):
    engine = FakeEngine(gate=anyio.Event())
    home = house(engine, limits=GatewayLimits(keepalive_s=0.02))
    ticket = await home.gateway.open_session("s")
    body = ({"input": "x"} if path == "/v1/responses" else HELLO) | {"stream": True}
    async with served(home) as url, httpx.AsyncClient(base_url=url) as client:
        headers = {"authorization": f"Bearer {ticket.token}"}
        async with client.stream("POST", path, json=body, headers=headers) as response:
            lines: list[str] = []
            async for line in response.aiter_lines():
                lines.append(line)
                if line.startswith(ping):
                    engine.gate.set()
    assert any("ok" in line for line in lines)


async def test_a_call_that_takes_too_long_is_given_up():
    home = house(FakeEngine(gate=anyio.Event()), limits=GatewayLimits(call_deadline_s=0.01))
    ticket = await home.gateway.open_session("s")
    assert (await ask(home, ticket.token)).status_code == 503
    with pytest.raises(UnauthorizedError):
        await home.gateway.sessions.resolve("nonsense")


async def test_a_log_that_does_not_answer_is_named():
    home = house(limits=GatewayLimits(record_deadline_s=0.01, peer_deadline_s=0.01))
    home.recorder.gate = anyio.Event()
    with pytest.raises(UnavailableError, match="did not answer within"):
        await home.gateway.open_session("s")
