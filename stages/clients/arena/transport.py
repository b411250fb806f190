"""Sends requests: one pooled HTTP client, bounded tries, errors translated at this edge and nowhere else.

Knows HTTP; what a path means, `client.py` knows.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from datetime import datetime
from typing import Literal

import aiohttp
import anyio
import httpx
import msgspec

from stages.clients.arena.errors import (
    ERROR_TEXT_LIMIT,
    ArenaAuthError,
    ArenaBusyError,
    ArenaConnectionError,
    ArenaContractError,
    ArenaError,
    ArenaNotFoundError,
    ArenaRefusedError,
)
from stages.clients.arena.retry import pause_s, retryable_status
from stages.clients.arena.secret import Secret, scrubbed

Method = Literal["GET", "POST", "PATCH", "DELETE"]
Sleep = Callable[[float], Awaitable[None]]
Clock = Callable[[], datetime]
Heard = Callable[[str], None]
"""Told after each try: empty when the Arena answered, else what happened instead."""


def nobody_asks(problem: str) -> None:
    """Nobody asks whether the Arena answers."""


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One request, to be sent up to `tries` times."""

    method: Method
    url: str
    authorization: Secret
    tries: int
    timeout_s: float
    """Of each try."""
    params: Mapping[str, str | int] = {}
    body: object = None
    headers: Mapping[str, str] = {}
    secrets: tuple[Secret, ...] = ()
    """Credentials in headers or body, beside the authorization."""

    def __repr__(self) -> str:
        return f"Request({self.method} {self.url})"


class Transport:
    """Sends requests over one connection pool."""

    def __init__(
        self, http: httpx.AsyncClient, *, known: Iterable[Secret], sleep: Sleep, clock: Clock, heard: Heard
    ) -> None:
        self._http = http
        self._known = tuple(known)
        self._sleep = sleep
        self._clock = clock
        self._heard = heard
        self._asked: dict[object, float] = {}
        """When each request in flight was sent, the oldest first."""
        self._answered_s = 0.0

    def silent_s(self) -> float:
        """For how long nothing was answered although something is asked; 0 while nothing is."""
        oldest_s = next(iter(self._asked.values()), None)
        return 0.0 if oldest_s is None else anyio.current_time() - max(oldest_s, self._answered_s)

    async def send(self, request: Request) -> object:
        """The decoded JSON of a successful answer; None for an empty one.

        Raises:
            ArenaConnectionError, ArenaBusyError: After the last try.
            ArenaRefusedError: Another 4xx, at once.
            ArenaContractError: A successful answer that is no JSON.
        """
        for number in range(request.tries):
            last = number == request.tries - 1
            retry_after = None
            try:
                answer = await self._send_once(request)
            except (httpx.HTTPError, aiohttp.ClientError, OSError, TimeoutError) as error:
                failure: ArenaError = self._connection_error(request, error)
                self._heard(str(failure))
                if last:
                    raise failure from error
            else:
                self._heard("" if answer.status_code < 500 else f"{_name(request)}: HTTP {answer.status_code}")
                if answer.is_success:
                    return self._decoded(request, answer)
                failure = self._status_error(request, answer)
                retry_after = answer.headers.get("Retry-After")
                if last or not retryable_status(answer.status_code):
                    raise failure
            await self._sleep(pause_s(number, retry_after, self._clock()))
        raise ValueError(f"{request!r} has tries = {request.tries}: expected 1 or more")

    async def _send_once(self, request: Request) -> httpx.Response:
        headers = {**request.headers, "Authorization": f"Bearer {request.authorization.reveal()}"}
        content = None
        if request.body is not None:
            content = msgspec.json.encode(request.body)
            headers["Content-Type"] = "application/json"
        mark = object()
        self._asked[mark] = anyio.current_time()
        try:
            with anyio.fail_after(request.timeout_s):
                answer = await self._http.request(
                    request.method, request.url, params=dict(request.params) or None, headers=headers, content=content
                )
        finally:
            del self._asked[mark]
        self._answered_s = anyio.current_time()
        return answer

    def _decoded(self, request: Request, answer: httpx.Response) -> object:
        if not answer.content:
            return None
        try:
            return msgspec.json.decode(answer.content)
        except msgspec.MsgspecError as error:
            text = self._quoted(request, answer.text)
            raise ArenaContractError(f"{_name(request)}: expected JSON, found {text!r}") from error

    def _status_error(self, request: Request, answer: httpx.Response) -> ArenaError:
        status = answer.status_code
        text = f"{_name(request)}: HTTP {status}: {self._quoted(request, answer.text)}"
        if retryable_status(status):
            return ArenaBusyError(text, status=status, retry_after=answer.headers.get("Retry-After"))
        if status == 404:
            return ArenaNotFoundError(text, status=status)
        kind = ArenaAuthError if status in (401, 403) else ArenaRefusedError
        return kind(text, status=status)

    def _connection_error(self, request: Request, error: Exception) -> ArenaError:
        what = f"{type(error).__name__}: {self._quoted(request, str(error))}"
        if isinstance(error, TimeoutError):
            what = f"no answer within {request.timeout_s} s"
        return ArenaConnectionError(f"{_name(request)}: {what}")

    def _quoted(self, request: Request, text: str) -> str:
        """A foreign text, credentials out first, then cut: a cut credential would no longer be recognised."""
        clean = scrubbed(text, (*self._known, request.authorization, *request.secrets))
        return clean[:ERROR_TEXT_LIMIT]


def _name(request: Request) -> str:
    return f"{request.method} {httpx.URL(request.url).path}"
