"""Sessions opened and closed by launchers: requests to gateways over the broker, never on the log."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager

import anyio
import msgspec
import pytest

from broker.memory import MemoryBroker, MemoryServer
from ops.rollout_adapters import LogRecorder
from ops.session_calls import RemoteSessions, SessionReply, serve_sessions
from pipeline.errors import RefusedError, RetryableError
from pipeline.log import RunLog
from schemas.messages.rollout import SessionClosed, SessionOpened
from stages.gateway.errors import BusyError, InvalidRequestError
from stages.gateway.session import SessionTicket
from stages.ports import EngineHealth


class OneGateway:
    """A gateway that takes any session; what it does stands on the log, as a real one's."""

    def __init__(self, name: str, log: RunLog) -> None:
        self.name, self.log = name, log
        self.failing: Exception | None = None
        self.closed: list[str] = []
        self.version = 0
        self.num_asked = 0

    async def health(self) -> EngineHealth:
        self.num_asked += 1
        return EngineHealth(ready=True, version=self.version, num_running=0, num_waiting=0, max_context=64)

    async def open_session(self, session_id: str, min_version: int = 0) -> SessionTicket:
        if self.failing is not None:
            raise self.failing
        opened = SessionOpened(session=session_id, gateway=self.name, token_digest="d", min_version=min_version)
        await self.log.publish(opened)
        return SessionTicket(session=session_id, token="marked-token", base_url=f"http://{self.name}")

    async def close_session(self, session_id: str) -> SessionClosed:
        if self.failing is not None:
            raise self.failing
        self.closed.append(session_id)
        return await self.log.publish(SessionClosed(session=session_id, num_interactions=1))


@asynccontextmanager
async def launchers(*names: str) -> AsyncGenerator[tuple[RemoteSessions, dict[str, OneGateway], AsyncExitStack]]:
    broker = MemoryBroker(MemoryServer(), "demo")
    log = RunLog(broker)
    gateways = {name: OneGateway(name, log) for name in names}
    async with AsyncExitStack() as stack:
        for name, gateway in gateways.items():
            await stack.enter_async_context(serve_sessions(broker, gateway, name, gateway.health))
        yield RemoteSessions(broker, LogRecorder(log), deadline_s=0.2), gateways, stack


async def test_a_session_is_opened_at_any_gateway_and_closed_at_its_own() -> None:
    async with launchers("gw-1", "gw-2") as (sessions, gateways, _):
        for number in range(8):
            ticket = await sessions.open(f"s{number}", min_version=3)
            owner = ticket.base_url.removeprefix("http://")
            closed = await sessions.close(f"s{number}")
            assert closed.num_interactions == 1
            assert gateways[owner].closed[-1] == f"s{number}"
            assert "marked-token" not in repr(ticket)


async def test_a_dead_gateways_session_is_closed_by_another() -> None:
    async with launchers("gw-2") as (sessions, gateways, _):
        await gateways["gw-2"].log.publish(SessionOpened(session="s", gateway="gw-1", token_digest="d"))
        assert (await sessions.close("s")).session == "s"
        assert gateways["gw-2"].closed == ["s"]


async def test_a_dead_gateway_is_not_waited_for_as_long_as_a_busy_one() -> None:
    async with launchers("gw-2") as (sessions, gateways, _):
        patient = RemoteSessions(sessions._broker, sessions._recorder, deadline_s=600.0, own_deadline_s=0.05)
        await gateways["gw-2"].log.publish(SessionOpened(session="s", gateway="gw-1", token_digest="d"))
        with anyio.fail_after(20):
            assert (await patient.close("s")).session == "s"


async def test_an_end_that_stands_is_not_asked_for_again() -> None:
    async with launchers("gw-1") as (sessions, gateways, _):
        await gateways["gw-1"].log.publish(SessionClosed(session="s", num_interactions=7))
        assert (await sessions.close("s")).num_interactions == 7
        assert gateways["gw-1"].closed == []


async def test_what_may_succeed_later_is_tried_again_and_what_can_not_is_refused() -> None:
    async with launchers("gw-1") as (sessions, gateways, stack):
        gateways["gw-1"].failing = BusyError("10000 sessions are open")
        with pytest.raises(RetryableError, match="10000 sessions are open"):
            await sessions.open("s", min_version=0)
        gateways["gw-1"].failing = InvalidRequestError("a session id is …")
        with pytest.raises(RefusedError, match="a session id is"):
            await sessions.open("s", min_version=0)
        await stack.aclose()
        with pytest.raises(RetryableError, match="no gateway did it"):
            await sessions.open("s", min_version=0)


def test_a_reply_does_not_show_its_token() -> None:
    assert "marked-token" not in repr(SessionReply(token="marked-token"))


async def test_weights_that_are_on_their_way_are_asked_for_by_one_of_many() -> None:
    async with launchers("gw-1") as (sessions, gateways, _):
        assert await sessions.serves(0)
        assert not any([await sessions.serves(version) for version in [3] * 50])
        assert gateways["gw-1"].num_asked == 1
        gateways["gw-1"].version = 2
        assert await sessions.serves(2), "an older one was not asked for"
        gateways["gw-1"].version = 4
        with anyio.fail_after(20):
            while not await sessions.serves(3):
                await anyio.lowlevel.checkpoint()
        num_asked = gateways["gw-1"].num_asked
        assert await sessions.serves(3)
        assert gateways["gw-1"].num_asked == num_asked, "what was served once is not asked for again"


def test_one_of_several_engines_is_enough() -> None:
    old = EngineHealth(ready=True, version=1, num_running=0, num_waiting=0, max_context=64)
    assert (old.serves(1), old.serves(2)) == (True, False)
    assert msgspec.structs.replace(old, newest_version=2).serves(2)
    assert not msgspec.structs.replace(old, ready=False).serves(1)
