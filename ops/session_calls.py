"""Opening and closing sessions from another process: requests on core subjects, never on the log.

launcher ──hrq.<run>.gateways──▶ any gateway            (whether it serves a version yet; open)
──hrq.<run>.gateway.<name>──▶ the session's own (close), else any: it rebuilds the session from the log
"""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Final, Literal, Protocol

import anyio
import msgspec
import structlog

from broker.api import Broker
from broker.errors import BrokerError
from pipeline.errors import RefusedError, RetryableError
from schemas.ids import encode_token
from schemas.messages.rollout import SessionClosed
from stages.arena_launch.ports import SessionTicket
from stages.clients.arena.secret import Secret
from stages.gateway.errors import GatewayError, InvalidRequestError, SessionEndedError
from stages.gateway.ports import Recorder
from stages.gateway.session import SessionTicket as GatewayTicket
from stages.ports import EngineHealth

log = structlog.get_logger("headrace.sessions")

OWN_DEADLINE_S: Final = 5.0
"""A gateway ends a session within milliseconds; one that does not answer for so long is gone, as its peers see it, too."""

_ASKED_AGAIN_S: Final = 0.1


class SessionRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What a launcher asks a gateway."""

    action: Literal["serves", "open", "close"]
    session: str = ""
    min_version: int = 0


class SessionReply(msgspec.Struct, frozen=True, kw_only=True):
    """What the gateway answers: one of the four."""

    token: str = ""
    base_url: str = ""
    closed: SessionClosed | None = None
    serves: bool = False
    error: str = ""
    permanent: bool = False
    """Asking again won't help."""

    def __repr__(self) -> str:
        return f"SessionReply(closed={self.closed!r}, error={self.error!r})"


class GatewaySessions(Protocol):
    """The gateway's own calls."""

    async def open_session(self, session_id: str, min_version: int = 0) -> GatewayTicket: ...

    async def close_session(self, session_id: str) -> SessionClosed: ...


def any_gateway(run: str) -> str:
    """Where any gateway of a run answers."""
    return f"hrq.{run}.gateways"


def one_gateway(run: str, name: str) -> str:
    """Where one gateway answers."""
    return f"hrq.{run}.gateway.{encode_token(name)}"


@asynccontextmanager
async def serve_sessions(
    broker: Broker, gateway: GatewaySessions, name: str, health: Callable[[], Awaitable[EngineHealth]]
) -> AsyncGenerator[None]:
    """Answer launchers while the context is open.

    Args:
        broker: of the run.
        gateway: has the sessions.
        name: the gateway's.
        health: of the engines that it samples from.
    """

    async def answer(data: bytes) -> bytes:
        request = msgspec.msgpack.decode(data, type=SessionRequest)
        try:
            if request.action == "serves":
                reply = SessionReply(serves=(await health()).serves(request.min_version))
            elif request.action == "open":
                ticket = await gateway.open_session(request.session, request.min_version)
                reply = SessionReply(token=ticket.token, base_url=ticket.base_url)
            else:
                reply = SessionReply(closed=await gateway.close_session(request.session))
        except (SessionEndedError, InvalidRequestError) as error:
            reply = SessionReply(error=str(error), permanent=True)
        except GatewayError as error:
            reply = SessionReply(error=str(error))
        return msgspec.msgpack.encode(reply)

    async with (
        broker.serve(any_gateway(broker.run), answer),
        broker.serve(one_gateway(broker.run, name), answer),
    ):
        yield


class RemoteSessions:
    """The launch stage's `Sessions`."""

    def __init__(
        self, broker: Broker, recorder: Recorder, *, deadline_s: float = 15.0, own_deadline_s: float = OWN_DEADLINE_S
    ) -> None:
        """Args:
        deadline_s: for an answer of any gateway.
        own_deadline_s: for one of the gateway that has the session; then any other does it.
        """
        self._broker: Final = broker
        self._recorder: Final = recorder
        self._deadline_s: Final = deadline_s
        self._own_deadline_s: Final = min(own_deadline_s, deadline_s)
        self._served = 0
        """The newest version that was asked for and is served."""
        self._refused = (0, -math.inf)
        """The last version that was not, and when that was said."""

    async def open(self, session: str, *, min_version: int) -> SessionTicket:
        request = SessionRequest(action="open", session=session, min_version=min_version)
        reply = await self._ask([any_gateway(self._broker.run)], request)
        return SessionTicket(session=session, token=Secret(reply.token), base_url=reply.base_url)

    async def serves(self, version: int) -> bool:
        if version > self._served:
            refused, asked_s = self._refused
            if version >= refused and anyio.current_time() < asked_s + _ASKED_AGAIN_S:
                return False  # thousands of episodes may wait for the same weights
            request = SessionRequest(action="serves", min_version=version)
            if not (await self._ask([any_gateway(self._broker.run)], request)).serves:
                self._refused = (version, anyio.current_time())
                return False
            self._served = version
        return True

    async def close(self, session: str) -> SessionClosed:
        stands = await self._recorder.read_closing(session)
        if stands is not None:
            return stands
        openings = await self._recorder.read_openings(session)
        subjects = [any_gateway(self._broker.run)]
        if openings:
            subjects.insert(0, one_gateway(self._broker.run, openings[-1].gateway))
        reply = await self._ask(subjects, SessionRequest(action="close", session=session))
        if reply.closed is None:
            raise RetryableError(f"closing session {session}: the gateway's answer names no end")
        return reply.closed

    async def _ask(self, subjects: list[str], request: SessionRequest) -> SessionReply:
        what = (
            f"{request.action} session {request.session}"
            if request.session
            else f"asking whether version {request.min_version} is served"
        )
        failure = ""
        for subject in subjects:
            try:
                any_one = subject == any_gateway(self._broker.run)
                deadline_s = self._deadline_s if any_one else self._own_deadline_s
                data = await self._broker.request(subject, msgspec.msgpack.encode(request), deadline_s=deadline_s)
            except BrokerError as error:
                failure = str(error)
                continue
            reply = msgspec.msgpack.decode(data, type=SessionReply)
            if not reply.error:
                return reply
            if reply.permanent:
                raise RefusedError(f"{what}: {reply.error}")
            failure = reply.error
        raise RetryableError(f"{what}: no gateway did it: {failure}")
