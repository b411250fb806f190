"""What is read of an HTTP request before anything is done for it: target, credentials, body; each within a bound.

The token names the session. `X-Session-Id` is not read: clients overwrite it.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Final

import msgspec

from stages.gateway.errors import (
    ClientGoneError,
    ForbiddenError,
    InvalidRequestError,
    SlowRequestError,
    TooLargeError,
    UnauthorizedError,
)
from stages.gateway.session import session_of
from stages.gateway.settings import GatewayLimits, GatewaySettings

Scope = MutableMapping[str, Any]  # Any: ASGI's own type
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]  # Any: ASGI's own type
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]  # Any: ASGI's own type

_BEARER: Final = "bearer "


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """An HTTP request without its body."""

    method: str
    path: str
    query: str
    headers: dict[str, str]
    """Names in lower case; of repeated ones the last."""


def read_request(scope: Scope) -> Request:
    """The request of an ASGI scope."""
    return Request(
        method=scope["method"],
        path=scope["path"],
        query=scope["query_string"].decode("latin-1"),
        headers={name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]},
    )


async def read_body(request: Request, receive: Receive, limits: GatewayLimits) -> bytes:
    """The whole body.

    Raises:
        TooLargeError, SlowRequestError, InvalidRequestError: above the limit, too slow, or encoded.
        ClientGoneError: the client gave up.
    """
    declared = request.headers.get("content-length", "0")
    if declared.isdigit() and int(declared) > limits.max_body_bytes:
        raise _too_large(limits)
    if request.headers.get("content-encoding", "identity") != "identity":
        raise InvalidRequestError("content-encoding: expected a body as it is, found a compressed one")
    parts: list[bytes] = []
    size = 0
    try:
        # asyncio's own: a body is there at once nearly always, and anyio's scopes cost several times as much
        async with asyncio.timeout(limits.body_deadline_s):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientGoneError
                part = message.get("body", b"")
                size += len(part)
                if size > limits.max_body_bytes:
                    raise _too_large(limits)
                if part:
                    parts.append(part)
                if not message.get("more_body", False):
                    return parts[0] if len(parts) == 1 else b"".join(parts)
    except TimeoutError as error:
        raise SlowRequestError(f"the body did not arrive within {limits.body_deadline_s:g} s") from error


def _too_large(limits: GatewayLimits) -> TooLargeError:
    return TooLargeError(f"the body is larger than {limits.max_body_bytes} bytes")


def session_token(request: Request, settings: GatewaySettings) -> str | None:
    """The session token that a request brings; None for a generation key alone (a probe).

    Raises:
        UnauthorizedError: neither, or tokens of two sessions.
        ForbiddenError: the control key, which does not generate.
    """
    named = request.headers.get("x-session-token", "")
    keys = [key for key in (_bearer(request), request.headers.get("x-api-key", "")) if key]
    tokens = {token for token in (named, *keys) if session_of(token) is not None}
    if len(tokens) == 1 and (not named or named in tokens):
        return tokens.pop()
    if len(tokens) > 1:
        raise UnauthorizedError("the request brings tokens of two sessions")
    if not named and any(_same(key, known) for key in keys for known in settings.generation_keys):
        return None
    if settings.control_key and any(_same(key, settings.control_key) for key in keys):
        raise ForbiddenError("the control key does not generate; use a session's token")
    raise UnauthorizedError("expected a session token; open a session first and send its token as the API key")


def check_control(request: Request, settings: GatewaySettings) -> None:
    """Whether a request may open, reward and end sessions.

    Raises:
        ForbiddenError: it brings a key that only generates, or these routes are closed.
        UnauthorizedError: it brings no key, or an unknown one.
    """
    key = _bearer(request) or request.headers.get("x-api-key", "")
    if settings.control_key and _same(key, settings.control_key):
        return
    generates = session_of(key) is not None or any(_same(key, known) for known in settings.generation_keys)
    if generates or not settings.control_key:
        raise ForbiddenError("this key only generates: it can neither open, reward nor end sessions")
    raise UnauthorizedError("expected the gateway's control key")


def _bearer(request: Request) -> str:
    value = request.headers.get("authorization", "")
    return value[len(_BEARER) :].strip() if value[: len(_BEARER)].lower() == _BEARER else ""


def _same(one: str, other: str) -> bool:
    return hmac.compare_digest(one.encode("utf-8", "replace"), other.encode("utf-8", "replace"))
