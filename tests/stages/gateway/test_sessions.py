"""Sessions: who may do what, what an end means, what survives a dead gateway."""

from collections.abc import AsyncIterator

import anyio
import httpx
import pytest
from gateway_fakes import CHAT, HELLO, FakeEngine, MemoryPayloads, MemoryRecorder, ask, chunk_of, house

from schemas.messages.rollout import FinishReason
from stages.gateway.errors import BusyError, InvalidRequestError, SessionEndedError
from stages.gateway.http import GatewayApp
from stages.gateway.session import new_token
from stages.gateway.settings import GatewayLimits
from stages.ports import ForwardedAnswer


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        (CHAT, "authentication_error"),
        ("/v1/responses", "authentication_error"),
        ("/v1/messages", "authentication_error"),
    ],
)
async def test_no_token_and_foreign_tokens_are_401_in_the_protocols_own_shape(path, kind):
    home = house()
    await home.gateway.open_session("s")
    for token in ("", "sk-something", new_token("s"), new_token("other"), "hrs.!!.x"):
        response = await ask(home, token, path=path)
        assert response.status_code == 401
        assert response.json()["error"]["type"] == kind
    assert home.engine.requests == []


@pytest.mark.parametrize("header", ["authorization", "x-api-key", "x-session-token"])
async def test_the_token_names_the_session_wherever_it_stands(header):
    home = house()
    ticket = await home.gateway.open_session("s")
    value = f"Bearer {ticket.token}" if header == "authorization" else ticket.token
    response = await ask(home, "", **{header: value, "x-session-id": "another"})
    assert response.status_code == 200
    assert len(home.recorder.interactions("s")) == 1


async def test_a_session_token_beside_a_generation_key_names_the_session():
    home = house(generation_keys=("gen",))
    ticket = await home.gateway.open_session("s")
    assert (await ask(home, "gen", **{"x-session-token": ticket.token})).status_code == 200
    assert (await ask(home, "gen", **{"x-session-token": new_token("s")})).status_code == 401
    assert len(home.recorder.interactions("s")) == 1


async def test_tokens_of_two_sessions_in_one_request_are_refused():
    home = house()
    one, two = await home.gateway.open_session("a"), await home.gateway.open_session("b")
    assert (await ask(home, one.token, **{"x-session-token": two.token})).status_code == 401


async def test_probes_enter_no_session():
    home = house(generation_keys=("gen",))
    await home.gateway.open_session("s")
    async with home.http() as client:
        assert (await client.head("/api/hello")).status_code == 200
        assert (await client.get("/health")).status_code == 200
        assert (await client.get("/v1/models")).json()["data"][0]["id"] == "policy"
    assert (await ask(home, "gen", HELLO | {"max_tokens": 500})).status_code == 200
    assert home.engine.requests[0].settings.max_new_tokens <= 16
    assert not [key for key in home.recorder.messages if key[0] == "interaction"]


async def test_a_session_token_can_neither_reward_nor_end_a_session():
    home = house(control_key="ctl")
    ticket = await home.gateway.open_session("s")
    for path in ("/v1/sessions", "/v1/sessions/s/reward", "/v1/sessions/s/close"):
        assert (await ask(home, ticket.token, {"score": 1.0}, path)).status_code == 403
        assert (await ask(home, "", {"score": 1.0}, path)).status_code == 401
    assert (await ask(home, "ctl")).status_code == 403


async def test_an_ended_session_answers_410_and_codex_400():
    home = house()
    ticket = await home.gateway.open_session("s")
    await home.gateway.close_session("s")
    gone = await ask(home, ticket.token)
    assert (gone.status_code, gone.headers["x-should-retry"]) == (410, "false")
    codex = await ask(home, ticket.token, {"input": "x"}, "/v1/responses", **{"user-agent": "codex_exec/0.171.0"})
    assert codex.status_code == 400
    with pytest.raises(SessionEndedError):
        await home.gateway.sessions.resolve(ticket.token)


async def test_opening_again_gives_the_same_ticket_and_closing_again_the_same_count():
    home = house()
    ticket = await home.gateway.open_session("s", min_version=3)
    assert await home.gateway.open_session("s") == ticket
    await ask(home, ticket.token)
    assert home.engine.requests[0].min_version == 3
    assert await home.gateway.close_session("s") == await home.gateway.close_session("s")


async def test_openings_of_one_session_at_the_same_time_give_one_ticket():
    home = house()
    tickets = []

    async def open_it():
        tickets.append(await home.gateway.open_session("s"))

    async with anyio.create_task_group() as tasks:
        for _ in range(5):
            tasks.start_soon(open_it)
    assert len({one.token for one in tickets}) == 1
    assert (await ask(home, tickets[0].token)).status_code == 200


async def test_a_fault_of_the_gateway_is_told_and_marks_the_session():
    def broken(call):
        raise ZeroDivisionError

    home = house(preprocessors=[broken])
    ticket = await home.gateway.open_session("s")
    response = await ask(home, ticket.token, HELLO, "/v1/messages")
    assert (response.status_code, response.json()["error"]["type"]) == (500, "api_error")
    assert "ZeroDivisionError" in (await home.gateway.close_session("s")).system_error


@pytest.mark.parametrize("name", ["", "-x", "a b", "a/b", "ä", "x" * 201])
async def test_illegal_session_ids_are_refused(name):
    with pytest.raises(InvalidRequestError):
        await house().gateway.open_session(name)


async def test_the_number_of_sessions_is_bounded():
    home = house(limits=GatewayLimits(max_sessions=1))
    await home.gateway.open_session("a")
    with pytest.raises(BusyError):
        await home.gateway.open_session("b")


async def test_a_session_goes_on_at_another_gateway_with_its_exact_tokens():
    recorder, payloads = MemoryRecorder(), MemoryPayloads()
    first = house(FakeEngine(["<think>\nhm\n</think>\n\nOne."]), recorder=recorder, payloads=payloads)
    ticket = await first.gateway.open_session("s")
    long = {"role": "user", "content": "count " * 5000}
    said = (await ask(first, ticket.token, {"messages": [long]})).json()["choices"][0]["message"]
    assert payloads.data
    second = house(FakeEngine(["Two."]), recorder=recorder, payloads=payloads, name="gw-2")
    messages = [long, said, {"role": "user", "content": "next"}]
    response = await ask(second, ticket.token, {"messages": messages})
    assert response.status_code == 200
    assert [one.parent for one in recorder.interactions("s")] == [None, 0]
    whole = await second.chain("s", 1)
    assert whole[: second.engine.requests[0].prompt_ids.size] == second.engine.requests[0].prompt_ids.tolist()
    assert (await second.gateway.close_session("s")).num_interactions == 2
    # The first gateway was only thought dead: what it would still record stands already, so it gives the session up.
    assert (await ask(first, ticket.token, {"messages": messages})).status_code == 503
    assert (await ask(first, ticket.token, {"messages": messages})).status_code == 410


async def test_raw_prompts_survive_a_dead_gateway_too():
    recorder, payloads = MemoryRecorder(), MemoryPayloads()
    first = house(
        FakeEngine(["two", [chunk_of([9, 8], finish=FinishReason.STOP)]]), recorder=recorder, payloads=payloads
    )
    ticket = await first.gateway.open_session("s")
    await ask(first, ticket.token, {"prompt": "one "}, "/v1/completions")
    await ask(first, ticket.token, {"prompt": [50, 51]}, "/v1/completions")
    second = house(FakeEngine(["x"]), recorder=recorder, payloads=payloads, name="gw-2")
    await ask(second, ticket.token, {"prompt": "one two three"}, "/v1/completions")
    await ask(second, ticket.token, {"prompt": [50, 51, 9, 8, 52]}, "/v1/completions")
    assert [one.parent for one in recorder.interactions("s")] == [None, None, 0, 1]


async def test_another_gateway_closes_what_a_dead_one_left():
    recorder = MemoryRecorder()
    first = house(recorder=recorder)
    ticket = await first.gateway.open_session("s")
    await ask(first, ticket.token)
    second = house(recorder=recorder, name="gw-2")
    assert (await second.gateway.close_session("s")).num_interactions == 1
    assert (await ask(second, ticket.token)).status_code == 410
    assert (await second.gateway.close_session("never-opened")).num_interactions == 0


async def test_the_first_end_of_a_session_holds_for_every_gateway():
    recorder = MemoryRecorder()
    first = house(recorder=recorder)
    ticket = await first.gateway.open_session("s")
    await ask(first, ticket.token)
    first.gateway.sessions.named("s").fail("seen by the first alone")
    ended = await house(recorder=recorder, name="gw-2").gateway.close_session("s")
    assert await first.gateway.close_session("s") == ended


class OnePeer:
    """Another gateway in the same process."""

    def __init__(self, home) -> None:
        self.home = home
        self.alive = True

    async def address(self, gateway: str) -> str | None:
        return f"http://{gateway}" if self.alive else None

    async def forward(self, base_url, target, headers, body) -> ForwardedAnswer:
        client = httpx.AsyncClient(transport=httpx.ASGITransport(app=GatewayApp(self.home.gateway)), base_url=base_url)
        response = await client.post(target, content=body, headers=dict(headers))

        async def parts() -> AsyncIterator[bytes]:
            yield response.content

        return ForwardedAnswer(status=response.status_code, headers=list(response.headers.items()), body=parts())


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_at_the_wrong_gateway_is_forwarded_to_the_right_one(stream):
    recorder = MemoryRecorder()
    owner = house(FakeEngine(["from the owner"]), recorder=recorder)
    ticket = await owner.gateway.open_session("s")
    other = house(recorder=recorder, name="gw-2", peers=OnePeer(owner))
    response = await ask(other, ticket.token, HELLO | {"stream": stream})
    assert response.status_code == 200
    assert ("[DONE]" if stream else "from the owner") in response.text
    assert other.engine.requests == []
    assert len(recorder.interactions("s")) == 1


async def test_a_session_of_a_dead_peer_is_taken_over():
    recorder = MemoryRecorder()
    owner = house(recorder=recorder)
    ticket = await owner.gateway.open_session("s")
    peer = OnePeer(owner)
    peer.alive = False
    other = house(FakeEngine(["taken over"]), recorder=recorder, name="gw-2", peers=peer)
    assert "taken over" in (await ask(other, ticket.token)).text


async def test_idle_sessions_are_closed_and_marked():
    now = [0.0]
    home = house(clock=lambda: now[0], limits=GatewayLimits(idle_expiry_s=60))
    ticket = await home.gateway.open_session("s")
    now[0] = 59
    assert await home.gateway.expire() == []
    await ask(home, ticket.token)
    now[0] = 118
    assert await home.gateway.expire() == []
    now[0] = 120
    (closed,) = await home.gateway.expire()
    assert closed.session == "s"
    assert "idle" in closed.system_error


async def test_a_run_without_online_streams_takes_no_online_sessions():
    home = house(control_key="ctl")
    refused = await ask(home, "ctl", {}, "/v1/sessions")
    assert (refused.status_code, "no stream has runner" in refused.text) == (403, True)
