"""One server's pooled HTTP session: calls with deadlines, event streams, every failure as one of the port's errors.

Knows nothing of tokens. Keys travel in a header and stand in no message.
"""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Final

import aiohttp
import anyio
import msgspec

from stages.clients.engines.settings import HttpEngineSettings
from stages.ports import BadRequestError, ContextOverflowError, EngineError, EngineUnavailableError

_MAX_EVENT_BYTES: Final = 64 * 1024 * 1024
_MAX_ERROR_CHARS: Final = 300
_KEEPALIVE_S: Final = 3.0
"""Both servers close a connection that was idle for 5 s; a call must not meet the moment when they do."""
_OVERFLOW_WORDS: Final = ("context length", "maximum context", "max_model_len", "max_seq_len", "is longer than")
_JSON: Final = {"Content-Type": "application/json"}


class EventSplitter:
    """Server-sent events from bytes that come in any pieces: the content of each event's data lines."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """The events that are complete now.

        Raises:
            EngineUnavailableError: An event is larger than any answer can be.
        """
        self._rest += data.replace(b"\r", b"")  # line ends alone have them: JSON writes its own as \\r
        if b"\n\n" not in self._rest:
            if len(self._rest) > _MAX_EVENT_BYTES:
                raise EngineUnavailableError(f"expected events below {_MAX_EVENT_BYTES} bytes, found a larger one")
            return []
        *whole, rest = bytes(self._rest).split(b"\n\n")
        self._rest = bytearray(rest)
        return [content for content in map(_content, whole) if content]

    @property
    def empty(self) -> bool:
        """Whether nothing waits for its end."""
        return not self._rest.strip()


def _content(event: bytes) -> bytes:
    lines = [line[5:].lstrip(b" ") for line in event.split(b"\n") if line.startswith(b"data:")]
    return b"\n".join(lines)


class Server:
    """Made by `open_server`."""

    def __init__(self, session: aiohttp.ClientSession, name: str, url: str, settings: HttpEngineSettings) -> None:
        self._session: Final = session
        self._name: Final = name
        self._url: Final = url.rstrip("/")
        self._settings: Final = settings
        self._streams: Final[set[aiohttp.ClientResponse]] = set()

    async def get(self, path: str, *, timeout_s: float | None = None) -> bytes:
        """GET; the body.

        Raises:
            EngineError: as `post`.
        """
        return await self._call("GET", path, None, timeout_s)

    async def post(
        self, path: str, body: Mapping[str, object] | None = None, *, timeout_s: float | None = None
    ) -> bytes:
        """POST a JSON object, or nothing; the body of the answer.

        Raises:
            BadRequestError, ContextOverflowError: The server refused what was asked.
            EngineUnavailableError: It is away, silent for too long, failing, or no such server.
        """
        return await self._call("POST", path, body, timeout_s)

    async def _call(self, method: str, path: str, body: Mapping[str, object] | None, timeout_s: float | None) -> bytes:
        limit_s = self._settings.call_timeout_s if timeout_s is None else timeout_s
        data, headers = (None, {}) if body is None else (msgspec.json.encode(body), _JSON)
        if self._session.closed:
            raise EngineUnavailableError(f"{self._where(path)}: the client was closed")
        try:
            with anyio.fail_after(limit_s):
                async with self._session.request(method, self._url + path, data=data, headers=headers) as response:
                    answer = await response.read()
        except TimeoutError as error:
            raise EngineUnavailableError(f"{self._where(path)}: no answer within {limit_s} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise self._lost(path, error) from error
        if response.status != 200:
            raise error_of(response.status, answer, self._where(path))
        return answer

    @asynccontextmanager
    async def stream(self, path: str, body: Mapping[str, object]) -> AsyncGenerator[AsyncIterator[list[bytes]]]:
        """POST, and what comes as lists of events: all that had arrived, each time. Leaving the block closes the connection,
        which ends the request at the server.

        Raises:
            EngineError: as `post`; also while events are read.
        """
        try:
            async with self._session.post(self._url + path, data=msgspec.json.encode(body), headers=_JSON) as response:
                if response.status != 200:
                    raise error_of(response.status, await response.read(), self._where(path))
                self._streams.add(response)
                try:
                    yield self._events(response, path)
                finally:
                    self._streams.discard(response)
        except TimeoutError as error:  # aiohttp's own: connecting, or silence
            raise EngineUnavailableError(
                f"{self._where(path)}: silent for {self._settings.silence_timeout_s} s"
            ) from error
        except (aiohttp.ClientError, OSError) as error:
            raise self._lost(path, error) from error

    async def _events(self, response: aiohttp.ClientResponse, path: str) -> AsyncIterator[list[bytes]]:
        splitter = EventSplitter()
        async for data in response.content.iter_any():
            events = splitter.feed(data)
            if events:
                yield events
        if not splitter.empty:
            raise EngineUnavailableError(f"{self._where(path)}: the stream ended within an event")

    def break_off(self) -> None:
        """Close the connection of every stream: whoever reads one gets EngineUnavailableError."""
        for response in self._streams:
            response.close()

    def _where(self, path: str) -> str:
        return f"engine {self._name} at {self._url}{path.partition('?')[0]}"

    def _lost(self, path: str, error: Exception) -> EngineUnavailableError:
        return EngineUnavailableError(f"{self._where(path)}: the connection failed: {type(error).__name__}: {error}")


def error_of(status: int, answer: bytes, where: str) -> EngineError:
    """The port's error for a refusal."""
    text = message_of(answer)
    told = f"{where} answered {status}: {text}"
    if status in (400, 413, 422):
        return ContextOverflowError(told) if any(words in text for words in _OVERFLOW_WORDS) else BadRequestError(told)
    return EngineUnavailableError(told)


def message_of(answer: bytes) -> str:
    """What an error's body says, in whichever of the servers' shapes."""
    try:
        value: object = msgspec.json.decode(answer)
    except msgspec.DecodeError:
        return answer[:_MAX_ERROR_CHARS].decode("utf-8", "replace")
    for name in ("error", "message", "detail"):
        if isinstance(value, dict) and name in value:
            value = value[name]
    return str(value)[:_MAX_ERROR_CHARS]


@asynccontextmanager
async def open_server(name: str, url: str, settings: HttpEngineSettings) -> AsyncGenerator[Server]:
    """A session with its pool, closed at the end.

    Raises:
        EngineError: The variable that should hold the key is empty.
    """
    headers: dict[str, str] = {}
    if settings.api_key_env:
        key = os.environ.get(settings.api_key_env, "")
        if not key:
            raise EngineError(f"engine {name}: expected its key in ${settings.api_key_env}, found nothing")
        headers["Authorization"] = f"Bearer {key}"
    timeout = aiohttp.ClientTimeout(
        total=None, sock_connect=settings.connect_timeout_s, sock_read=settings.silence_timeout_s
    )
    connector = aiohttp.TCPConnector(limit=settings.max_connections, keepalive_timeout=_KEEPALIVE_S)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout, headers=headers, trust_env=False) as session:
        yield Server(session, name, url, settings)
