"""When an interaction is stored: `strict` before its answer ends, `fast` behind it, and what a silent or refusing log does to both."""

from contextlib import asynccontextmanager

import anyio
import msgspec
from gateway_fakes import CHAT, HELLO, ask, house

from schemas.messages.rollout import SessionClosed
from stages.gateway.http import GatewayApp
from stages.gateway.settings import GatewayLimits, Recording


async def test_strict_ends_no_answer_before_it_is_stored():
    home = house()
    ticket = await home.gateway.open_session("s")
    home.recorder.gate = anyio.Event()
    sent: list[bytes] = []
    done = anyio.Event()

    async def receive():
        if not sent_request:
            sent_request.append(1)
            return {"type": "http.request", "body": msgspec.json.encode(HELLO | {"stream": True}), "more_body": False}
        return await anyio.sleep_forever()

    async def send(message):
        sent.append(message.get("body", b""))
        if message["type"] == "http.response.body" and not message["more_body"]:
            done.set()

    sent_request: list[int] = []
    headers = [(b"authorization", f"Bearer {ticket.token}".encode())]
    scope = {"type": "http", "method": "POST", "path": CHAT, "query_string": b"", "headers": headers}
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(GatewayApp(home.gateway), scope, receive, send)
        while b"ok" not in b"".join(sent):
            await anyio.lowlevel.checkpoint()
        for _ in range(50):
            await anyio.lowlevel.checkpoint()
        assert b"[DONE]" not in b"".join(sent)
        home.recorder.gate.set()
        await done.wait()
        tasks.cancel_scope.cancel()
    assert b"[DONE]" in b"".join(sent)


async def test_a_log_that_is_away_fails_the_call_and_marks_the_session():
    home = house()
    ticket = await home.gateway.open_session("s")
    home.recorder.failing = True
    assert (await ask(home, ticket.token)).status_code == 503
    home.recorder.failing = False
    assert "log" in (await home.gateway.close_session("s")).system_error


async def test_fast_stores_behind_the_answer_and_all_of_it_before_the_close():
    home = house(recording=Recording.FAST)
    async with anyio.create_task_group() as tasks:
        await tasks.start(home.gateway.run)
        ticket = await home.gateway.open_session("s")
        home.recorder.gate = anyio.Event()
        for _ in range(3):
            assert (await ask(home, ticket.token)).status_code == 200
        assert home.recorder.interactions("s") == []
        closed: list[SessionClosed] = []

        async def close():
            closed.append(await home.gateway.close_session("s"))

        tasks.start_soon(close)
        await anyio.lowlevel.checkpoint()
        home.recorder.gate.set()
        while not closed:
            await anyio.lowlevel.checkpoint()
        tasks.cancel_scope.cancel()
    assert (closed[0].num_interactions, closed[0].lossy) == (3, True)
    assert len(home.recorder.interactions("s")) == 3


async def test_fast_stores_its_backlog_when_the_gateway_is_stopped():
    home = house(recording=Recording.FAST)
    async with anyio.create_task_group() as tasks:
        await tasks.start(home.gateway.run)
        ticket = await home.gateway.open_session("s")
        home.recorder.gate = anyio.Event()
        for _ in range(20):
            await ask(home, ticket.token)
        assert home.recorder.interactions("s") == []
        tasks.cancel_scope.cancel()
        home.recorder.gate.set()
    assert len(home.recorder.interactions("s")) == 20


@asynccontextmanager
async def full_backlog():
    """A fast gateway whose log is silent: one answer fills the backlog, another waits for a place in it."""
    home = house(recording=Recording.FAST, limits=GatewayLimits(fast_backlog=1))
    async with anyio.create_task_group() as tasks:
        await tasks.start(home.gateway.run)
        ticket = await home.gateway.open_session("s")
        home.recorder.gate = anyio.Event()
        await ask(home, ticket.token)
        answered: list[int] = []
        waiting = anyio.CancelScope()

        async def wait_for_a_place():
            with waiting:
                answered.append((await ask(home, ticket.token)).status_code)

        tasks.start_soon(wait_for_a_place)
        while not any(lane.places.statistics().tasks_waiting for lane in home.gateway._writer._lanes):
            await anyio.lowlevel.checkpoint()
        yield home, ticket, waiting, answered
        tasks.cancel_scope.cancel()


async def test_fast_forgets_a_call_whose_client_left_while_it_waited_for_the_backlog():
    async with full_backlog() as (home, ticket, waiting, answered):
        waiting.cancel()
        home.recorder.gate.set()
        assert (await ask(home, ticket.token)).status_code == 200
        with anyio.fail_after(20):
            closed = await home.gateway.close_session("s")
        assert answered == []
        assert (closed.num_interactions, closed.system_error) == (2, "")
        assert [one.ordinal for one in home.recorder.interactions("s")] == [0, 1]


async def test_fast_ends_a_session_whose_call_waits_for_the_backlog():
    async with full_backlog() as (home, _, _, answered):
        home.recorder.gate.set()
        with anyio.fail_after(20):
            closed = await home.gateway.close_session("s")
            while not answered:
                await anyio.lowlevel.checkpoint()
        assert (closed.num_interactions, closed.late_drops, answered) == (1, 1, [410])
        assert len(home.recorder.interactions("s")) == 1


async def test_fast_marks_a_session_whose_interaction_the_log_refused():
    home = house(recording=Recording.FAST)
    async with anyio.create_task_group() as tasks:
        await tasks.start(home.gateway.run)
        ticket = await home.gateway.open_session("s")
        home.recorder.gate, home.recorder.failing = anyio.Event(), True
        for _ in range(2):
            await ask(home, ticket.token)
        home.recorder.gate.set()
        await home.gateway._writer.flush(home.gateway.sessions.named("s"))
        home.recorder.failing = False
        closed = await home.gateway.close_session("s")
        tasks.cancel_scope.cancel()
    assert (closed.num_interactions, "log" in closed.system_error) == (0, True)
