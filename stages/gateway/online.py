"""Online sessions over HTTP: a user's own agent or service opens one, works, sets a reward, ends it.

    POST /v1/sessions            {request_id?, stream?, task?, wait_s?}            a session with its token, or 429
    POST /v1/sessions/ID/reward  {score? | turn_rewards?, final?}                  also after its end, within a bound
    POST /v1/sessions/ID/close   {score? | turn_rewards?, final?, discard?}
    GET  /v1/sessions/ID

All with the control key: a session's own token generates, and nothing else. Who has a slot is decided behind `OnlineSessions`.
"""

from __future__ import annotations

import math
from typing import Final

import msgspec

from stages.gateway.errors import BusyError, ForbiddenError, InvalidRequestError, UnknownRouteError
from stages.gateway.gateway import Gateway
from stages.gateway.ports import Asked, OnlineSessions, OnlineState, Rewards
from stages.gateway.protocols.wire import decode_body
from stages.gateway.reading import Request, check_control
from stages.gateway.session import Session, check_session_id

_RETRY_AFTER_S: Final = 5
_MAX_WAIT_S: Final = 300.0
_MAX_TASK_CHARACTERS: Final = 512


class _Opening(msgspec.Struct, forbid_unknown_fields=True):
    request_id: str = ""
    stream: str = ""
    task: str = ""
    wait_s: float = 0.0


class _Rewarding(msgspec.Struct, forbid_unknown_fields=True):
    score: float | None = None
    turn_rewards: dict[str, float] = {}
    final: bool = True
    discard: bool = False


_opening: Final = msgspec.json.Decoder(_Opening)
_rewarding: Final = msgspec.json.Decoder(_Rewarding)


class OnlineRoutes:
    """Serves /sessions."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def post(self, request: Request, path: str, body: bytes) -> dict[str, object] | str:
        """Open, reward or end a session. An address instead of an answer: the gateway that has the session.

        Raises:
            GatewayError: see `check_control`; 404 for unknown sessions; 410 for ended episodes; 429 without credit.
        """
        check_control(request, self._gateway.settings)
        online = self._online()
        match path.strip("/").split("/"):
            case ["sessions"]:
                return await self._open(online, decode_body(_opening, body or b"{}"))
            case ["sessions", name, ("reward" | "close") as action]:
                rewarding = decode_body(_rewarding, body or b"{}")
                _check_rewards(rewarding, needed=action == "reward")
                state = await self._state(online, name)
                place = await self._gateway.sessions.locate(name) if state.state == "open" else None
                if isinstance(place, str):
                    return place
                return await self._reward_or_close(online, state, place, rewarding, closes=action == "close")
            case _:
                raise UnknownRouteError(f"nothing is served at {request.path}")

    async def get(self, request: Request, path: str) -> dict[str, object]:
        """How a session is."""
        check_control(request, self._gateway.settings)
        state = await self._state(self._online(), path.strip("/").split("/")[-1])
        session = self._gateway.sessions.named(state.session)
        answer: dict[str, object] = {**msgspec.structs.asdict(state), "session_id": state.session}
        del answer["session"]
        if session is not None:
            answer |= {
                "num_interactions": len(session.forest.nodes),
                "num_running": len(session.running),
                "context_overflow": session.context_overflow,
                "system_error": session.system_error,
            }
        return answer

    def _online(self) -> OnlineSessions:
        online = self._gateway.online
        if online is None:
            raise ForbiddenError("this run takes no online sessions: no stream has runner = 'online'")
        return online

    async def _state(self, online: OnlineSessions, name: str) -> OnlineState:
        state = await online.state(check_session_id(name))
        if state is None:
            raise UnknownRouteError(f"no online session {name!r}")
        return state

    async def _open(self, online: OnlineSessions, opening: _Opening) -> dict[str, object] | str:
        if opening.request_id:
            check_session_id(opening.request_id)
        if not 0 <= opening.wait_s <= _MAX_WAIT_S:
            raise InvalidRequestError(f"wait_s: expected 0 to {_MAX_WAIT_S:g}, found {opening.wait_s:g}")
        if len(opening.task) > _MAX_TASK_CHARACTERS:
            raise InvalidRequestError(f"task: expected at most {_MAX_TASK_CHARACTERS} characters")
        claimed = await online.claim(
            Asked(request_id=opening.request_id, stream=opening.stream, task=opening.task, wait_s=opening.wait_s)
        )
        if claimed is None:
            raise BusyError("no credit for another session now", retry_after_s=_RETRY_AFTER_S)
        place = await self._gateway.sessions.locate(claimed.session) if claimed.again else None
        if isinstance(place, str):
            return place
        ticket = await self._gateway.open_session(claimed.session, claimed.min_version, again=claimed.again)
        return {
            "session_id": ticket.session,
            "token": ticket.token,
            "base_url": ticket.base_url,
            "stream": claimed.stream,
            "group": claimed.group,
            "slot": claimed.slot,
            "data_id": claimed.data_id,
            "tags": claimed.tags,
            "task": claimed.task,
            "evaluation": claimed.evaluation,
        }

    async def _reward_or_close(
        self, online: OnlineSessions, state: OnlineState, session: Session | None, given: _Rewarding, *, closes: bool
    ) -> dict[str, object]:
        await self._check_ids(state.session, session, given)
        if given.score is not None or given.turn_rewards or given.discard:
            await online.reward(
                state.session,
                Rewards(score=given.score, turn_rewards=given.turn_rewards, final=given.final, discard=given.discard),
            )
        if not closes:
            return {"session_id": state.session}
        closed = await self._gateway.close_session(state.session)
        return {"session_id": state.session, "num_interactions": closed.num_interactions}

    async def _check_ids(self, name: str, session: Session | None, given: _Rewarding) -> None:
        if not given.turn_rewards:
            return
        known = session.interaction_ids if session is not None else await self._gateway.sessions.recorded_ids(name)
        unknown = given.turn_rewards.keys() - known
        if unknown:
            raise InvalidRequestError(f"turn_rewards: no interaction of this session has the id {min(unknown)!r}")


def _check_rewards(given: _Rewarding, *, needed: bool) -> None:
    numbers = [*given.turn_rewards.values(), *(() if given.score is None else (given.score,))]
    if not all(math.isfinite(one) for one in numbers):
        raise InvalidRequestError("rewards: expected finite numbers")
    if needed and not numbers and not given.discard:
        raise InvalidRequestError("rewards: expected a score, turn_rewards or discard, found none")
