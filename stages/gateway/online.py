"""Online sessions over HTTP: a user's own agent or service opens one, works, sets a reward, ends it.

`POST /v1/sessions` {session_id?} → ticket · `POST /v1/sessions/ID/reward` {score? | turn_rewards?} · `POST /v1/sessions/ID/close` ·
`GET /v1/sessions/ID`. All with the control key: a session's own token generates, and nothing else.
"""

from __future__ import annotations

import math
import secrets
from typing import Final

import msgspec

from stages.gateway.errors import BusyError, ForbiddenError, InvalidRequestError, UnknownRouteError
from stages.gateway.gateway import Gateway
from stages.gateway.protocols.wire import decode_body
from stages.gateway.reading import Request, check_control
from stages.gateway.session import Session

_RETRY_AFTER_S: Final = 5


class _Opening(msgspec.Struct, forbid_unknown_fields=True):
    session_id: str = ""


class _Rewards(msgspec.Struct, forbid_unknown_fields=True):
    score: float | None = None
    turn_rewards: dict[str, float] = {}


_opening: Final = msgspec.json.Decoder(_Opening)
_rewards: Final = msgspec.json.Decoder(_Rewards)


class OnlineRoutes:
    """Serves /sessions."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def post(self, request: Request, path: str, body: bytes) -> dict[str, object]:
        """Open, reward or end a session.

        Raises:
            GatewayError: see `check_control`; 404 for unknown sessions; 429 without credit.
        """
        check_control(request, self._gateway.settings)
        match path.strip("/").split("/"):
            case ["sessions"]:
                return await self._open(decode_body(_opening, body or b"{}"))
            case ["sessions", name, "reward"]:
                return self._reward(self._session(name), decode_body(_rewards, body or b"{}"))
            case ["sessions", name, "close"]:
                return await self._close(name, decode_body(_rewards, body or b"{}"))
            case _:
                raise UnknownRouteError(f"nothing is served at {request.path}")

    def get(self, request: Request, path: str) -> dict[str, object]:
        """How a session is."""
        check_control(request, self._gateway.settings)
        session = self._session(path.strip("/").split("/")[-1])
        return {
            "session_id": session.id,
            "num_interactions": len(session.forest.nodes),
            "num_running": len(session.running),
            "context_overflow": session.context_overflow,
            "system_error": session.system_error,
        }

    async def _open(self, opening: _Opening) -> dict[str, object]:
        online = self._gateway.online
        if online is None:
            raise ForbiddenError("this run takes no online sessions")
        name = opening.session_id or f"online-{secrets.token_hex(8)}"
        min_version = await online.admit(name)
        if min_version is None:
            raise BusyError("no credit for another session now", retry_after_s=_RETRY_AFTER_S)
        ticket = await self._gateway.open_session(name, min_version)
        return {"session_id": ticket.session, "token": ticket.token, "base_url": ticket.base_url}

    def _session(self, name: str) -> Session:
        session = self._gateway.sessions.named(name)
        if session is None:
            raise UnknownRouteError(f"no session {name[:200]!r} is open here")
        return session

    def _reward(self, session: Session, given: _Rewards) -> dict[str, object]:
        numbers = [*given.turn_rewards.values(), *(() if given.score is None else (given.score,))]
        if not all(math.isfinite(one) for one in numbers):
            raise InvalidRequestError("rewards: expected finite numbers")
        if not numbers:
            raise InvalidRequestError("rewards: expected a score or turn_rewards, found neither")
        unknown = given.turn_rewards.keys() - session.interaction_ids
        if unknown:
            raise InvalidRequestError(f"turn_rewards: no interaction of this session has the id {min(unknown)!r}")
        session.score = session.score if given.score is None else given.score
        session.turn_rewards.update(given.turn_rewards)
        return {"session_id": session.id}

    async def _close(self, name: str, given: _Rewards) -> dict[str, object]:
        session = self._session(name)
        if given.score is not None or given.turn_rewards:
            self._reward(session, given)
        closed = await self._gateway.close_session(name)
        if self._gateway.online is not None:
            await self._gateway.online.end(closed, score=session.score, turn_rewards=session.turn_rewards)
        return {"session_id": name, "num_interactions": closed.num_interactions}
