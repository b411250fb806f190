"""The gateway as an ASGI app: routes, streams, refusals. Knows no protocol's fields and samples nothing itself."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Final, TypeVar

import anyio
import structlog

from stages.gateway.conversation import Event, Message, Protocol_
from stages.gateway.errors import (
    BusyError,
    ClientGoneError,
    GatewayError,
    InternalError,
    SessionEndedError,
    UnavailableError,
    UnknownRouteError,
)
from stages.gateway.gateway import Gateway
from stages.gateway.online import OnlineRoutes
from stages.gateway.protocols.chat import parse_chat
from stages.gateway.protocols.completions import parse_completion
from stages.gateway.protocols.messages import parse_messages
from stages.gateway.protocols.messages_stream import MessagesExchange
from stages.gateway.protocols.responses import parse_responses
from stages.gateway.protocols.responses_stream import ResponsesExchange
from stages.gateway.protocols.wire import Exchange, check_density, error_body, to_json
from stages.gateway.reading import (
    Receive,
    Request,
    Scope,
    Send,
    read_body,
    read_request,
    session_token,
)
from stages.gateway.relaying import HOP_HEADERS, relay
from stages.gateway.session import Session
from stages.gateway.shortcuts import Cut, holds, resumed

T = TypeVar("T")
log = structlog.get_logger("headrace.gateway")

_PROTOCOLS: Final[dict[str, Protocol_]] = {
    "/chat/completions": "chat_completions",
    "/completions": "completions",
    "/responses": "responses",
    "/messages": "messages",
}
_COUNT: Final = "/messages/count_tokens"
_PROBES: Final = frozenset({"/", "/health", "/healthz", "/api/hello"})
_FORWARDED: Final = "x-headrace-forwarded"
_UNWATCHED_S: Final = 0.05
_HIGH_WATER_BYTES: Final = 64 * 1024
_SSE_HEADERS: Final = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class GatewayApp:
    """ASGI: one per gateway."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._settings = gateway.settings
        self._online = OnlineRoutes(gateway)
        self._started: Final = int(time.time())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.close", "code": 1000})
            return
        if scope["type"] != "http":
            return
        request = read_request(scope)
        path = request.path.removeprefix("/v1").rstrip("/") or "/"
        protocol: Protocol_ | None = "messages" if path == _COUNT else _PROTOCOLS.get(path)
        try:
            await self._route(request, path, protocol, receive, send)
        except ClientGoneError:
            return
        except GatewayError as error:
            await self._refuse(request, error, protocol, send)
        except (
            Exception
        ) as error:  # the edge: whatever went wrong is logged, and the client is told in its own protocol
            log.exception("fault of the gateway", path=request.path)
            await self._refuse(request, _own_fault(error), protocol, send)

    async def _route(
        self, request: Request, path: str, protocol: Protocol_ | None, receive: Receive, send: Send
    ) -> None:
        if request.method in ("GET", "HEAD"):
            await self._look(request, path, send)
            return
        if request.method != "POST":
            raise UnknownRouteError(f"expected GET, HEAD or POST, found {request.method}", status=405)
        if protocol is None:
            if not path.startswith("/sessions"):
                raise UnknownRouteError(f"nothing is served at {request.path}")
            body = await read_body(request, receive, self._settings.limits)
            answer = await _watched(receive, lambda scope: _within(scope, self._online.post(request, path, body)))
            if isinstance(answer, str):
                await self._forward(answer, request, body, receive, send)
            else:
                await _send_json(send, 200, to_json(answer))
            return
        token = session_token(request, self._settings)
        body = await read_body(request, receive, self._settings.limits)
        target = await self._gateway.sessions.resolve(token) if token is not None else None
        if isinstance(target, str):
            await self._forward(target, request, body, receive, send)
            return
        if path == _COUNT:
            check_density(body, self._settings.limits)
            counted = parse_messages(body, self._settings.limits)
            await _send_json(send, 200, to_json({"input_tokens": await self._gateway.count_tokens(counted)}))
            return
        exchange = self._exchange(protocol, target, body)
        if exchange.call.stream:
            await self._stream(exchange, target, receive, send)
        else:
            answers = await _watched(receive, lambda scope: self._gateway.answer(target, exchange.call, scope=scope))
            await _send_json(send, 200, exchange.reply(answers))

    async def _look(self, request: Request, path: str, send: Send) -> None:
        """What needs no session: probes and the list of models."""
        if path in _PROBES:
            await _send_json(send, 200, b'{"status":"ok"}' if request.method == "GET" else b"")
        elif path == "/models":
            models = [self._model(self._settings.model)]
            listed = {"object": "list", "data": models, "has_more": False}
            ends = {"first_id": self._settings.model, "last_id": self._settings.model}
            await _send_json(send, 200, to_json({**listed, **ends}))
        elif path.startswith("/models/"):
            await _send_json(send, 200, to_json(self._model(path.removeprefix("/models/"))))
        elif path.startswith("/sessions/"):
            await _send_json(send, 200, to_json(await self._online.get(request, path)))
        else:
            raise UnknownRouteError(f"nothing is served at {request.path}")

    def _model(self, name: str) -> dict[str, object]:
        created = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self._started))
        return {
            "id": name,
            "object": "model",
            "type": "model",
            "created": self._started,
            "created_at": created,
            "display_name": name,
            "owned_by": "headrace",
            "max_model_len": self._settings.context_length,
        }

    def _exchange(self, protocol: Protocol_, session: Session | None, body: bytes) -> Exchange:
        """Parse a body: only what is new of it, where its beginning is known."""
        if session is None or self._gateway.reads_whole or protocol == "completions":
            return self._parse(protocol, session, body, None)
        cut = session.shortcuts.find(protocol, body)
        exchange = self._parse(protocol, session, body, cut)
        match = session.forest.match(exchange.call)
        if cut is not None and not holds(exchange.call, match, cut):
            cut, exchange = None, self._parse(protocol, session, body, None)
            match = session.forest.match(exchange.call)
        session.shortcuts.keep(exchange.call, match, body, cut)
        return exchange

    def _parse(self, protocol: Protocol_, session: Session | None, body: bytes, cut: Cut | None) -> Exchange:
        limits, resumes = self._settings.limits, cut is not None
        read = body if cut is None else cut.body
        check_density(read, limits)
        match protocol:
            case "chat_completions":
                exchange: Exchange = parse_chat(read, limits, resumes=resumes)
            case "completions":
                exchange = parse_completion(read)
            case "messages":
                exchange = MessagesExchange(parse_messages(read, limits, resumes=resumes, sampled=True))
            case "responses":
                known = {} if session is None else session.responses
                request = parse_responses(read, limits, known, resumes=resumes)
                exchange = ResponsesExchange(request, _forget if session is None else session.remember_response)
        if cut is not None:
            exchange.call = resumed(exchange.call, cut, limits)
        return exchange

    async def _stream(self, exchange: Exchange, session: Session | None, receive: Receive, send: Send) -> None:
        stream = _Stream(exchange, send, self._settings.limits.keepalive_s)
        try:
            answers = await _while_connected(
                receive,
                lambda: self._gateway.answer(session, exchange.call, stream.emit),
                beside=stream.write,
                idle=stream.keep_alive,
                idle_s=self._settings.limits.keepalive_s,
            )
        except ClientGoneError:
            raise
        except GatewayError as error:
            if not stream.started:
                raise
            await stream.end(exchange.fail(error))
            return
        except Exception as error:  # as at the edge; an answer that has begun ends with the error in its stream
            if not stream.started:
                raise
            log.exception("fault of the gateway amid a stream")
            await stream.end(exchange.fail(_own_fault(error)))
            return
        await stream.end(exchange.finish(answers))

    async def _forward(self, address: str, request: Request, body: bytes, receive: Receive, send: Send) -> None:
        """Pass a request on to the gateway that has the session; when the client goes away, that one is told by the connection's end."""
        peers = self._gateway.peers
        if peers is None or _FORWARDED in request.headers:
            raise UnavailableError("the session is between two gateways; try again", retry_after_s=1)
        headers = {name: value for name, value in request.headers.items() if name not in HOP_HEADERS}
        target = f"{request.path}?{request.query}" if request.query else request.path
        passed_on = peers.forward(address, target, {**headers, _FORWARDED: "1"}, body)
        await _watched(receive, lambda scope: _within(scope, relay(passed_on, address, send)))

    async def _refuse(self, request: Request, error: GatewayError, protocol: Protocol_ | None, send: Send) -> None:
        if isinstance(error, SessionEndedError) and error.http_status == 410 and _retries_gone(request):
            error = SessionEndedError(error.message, status=400)
        headers: list[tuple[bytes, bytes]] = []
        if isinstance(error, SessionEndedError):
            headers.append((b"x-should-retry", b"false"))
        if error.retry_after_s is not None or isinstance(error, BusyError):
            headers.append((b"retry-after", str(error.retry_after_s or 1).encode()))
        if error.http_status in (408, 413):
            # What is left of the body is not read: the connection ends with the answer.
            headers.append((b"connection", b"close"))
        await _send_json(send, error.http_status, error_body(error, protocol), headers)


def _forget(response_id: str, messages: tuple[Message, ...]) -> None:
    """Probes leave nothing behind."""
    del response_id, messages


def _retries_gone(request: Request) -> bool:
    """Codex tries a 410 again and again; a 400 stops it."""
    return request.headers.get("user-agent", "").lower().startswith("codex") or "x-codex-window-id" in request.headers


class _Stream:
    """The body of one streaming answer.

    Its headers go out with the first event, so that a refusal keeps its status. Events are written by a task of its own: those that are
    ready at the same moment share a write, and a client that reads slowly holds sampling up beyond `_HIGH_WATER_BYTES`.
    """

    def __init__(self, exchange: Exchange, send: Send, keepalive_s: float) -> None:
        self._exchange = exchange
        self._send = send
        self._keepalive_s = keepalive_s
        self._last_s = time.monotonic()
        self._pending: list[bytes] = []
        self._num_bytes = 0
        self._wake = anyio.Event()
        self._sending = anyio.Lock()
        self.started = False

    async def emit(self, choice: int, events: Sequence[Event]) -> None:
        data = self._exchange.events(choice, events)
        if not data:
            return
        self._pending.append(data)
        self._num_bytes += len(data)
        self._wake.set()
        if self._num_bytes > _HIGH_WATER_BYTES:
            await self._flush()

    async def write(self) -> None:
        """Write what comes, until cancelled."""
        while True:
            await self._wake.wait()
            self._wake = anyio.Event()
            await self._flush()

    async def keep_alive(self) -> None:
        """Send a ping if nothing was sent for a while."""
        if time.monotonic() - self._last_s >= self._keepalive_s * 0.9:
            self._pending.append(self._exchange.ping())
            await self._flush()

    async def end(self, data: bytes) -> None:
        """The last events."""
        self._pending.append(data)
        await self._flush(more=False)

    async def _flush(self, *, more: bool = True) -> None:
        async with self._sending:
            if not self._pending:
                return
            if not self.started:
                self.started = True
                await self._send({"type": "http.response.start", "status": 200, "headers": _SSE_HEADERS})
                self._pending.insert(0, self._exchange.start())
            data = b"".join(self._pending)
            self._pending.clear()
            self._num_bytes = 0
            self._last_s = time.monotonic()
            await self._send({"type": "http.response.body", "body": data, "more_body": more})


def _own_fault(error: Exception) -> InternalError:
    return InternalError(f"a fault of the gateway: {type(error).__name__}")


async def _watched(receive: Receive, work: Callable[[anyio.CancelScope], Awaitable[T]]) -> T:
    """Do `work`, which enters the scope; give it up when the client goes away.

    Who looks out for that begins only after a while: a task for each quick call would cost a good part of it.

    Raises:
        ClientGoneError: the client went away.
        GatewayError: as `work` does.
    """
    scope = anyio.CancelScope()
    watchers: list[asyncio.Task[None]] = []

    async def watch() -> None:
        await receive()  # the body was read: all that comes is the disconnect
        scope.cancel()

    loop = asyncio.get_running_loop()
    timer = loop.call_later(_UNWATCHED_S, lambda: watchers.append(loop.create_task(watch())))
    try:
        return await work(scope)
    finally:
        timer.cancel()
        for watcher in watchers:
            watcher.cancel()


async def _within(scope: anyio.CancelScope, work: Awaitable[T]) -> T:
    with scope:
        return await work
    raise ClientGoneError


async def _while_connected(
    receive: Receive,
    work: Callable[[], Awaitable[T]],
    *,
    beside: Callable[[], Coroutine[object, object, None]],
    idle: Callable[[], Awaitable[None]],
    idle_s: float,
) -> T:
    """Do `work`; give it up when the client goes away. `beside` runs meanwhile, `idle` is called every `idle_s`.

    Raises:
        ClientGoneError: the client went away.
        GatewayError: as `work` does.
    """
    results: list[T] = []
    failures: list[Exception] = []

    async def attend() -> None:
        await _idle_until_gone(receive, idle, idle_s)
        tasks.cancel_scope.cancel()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(attend)
        tasks.start_soon(beside)
        try:
            results.append(await work())
        except Exception as error:  # noqa: BLE001 - carried out of the task group as it is, raised below
            failures.append(error)
        tasks.cancel_scope.cancel()
    if failures:
        raise failures[0]
    if not results:
        raise ClientGoneError
    return results[0]


async def _idle_until_gone(receive: Receive, idle: Callable[[], Awaitable[None]], idle_s: float) -> None:
    while True:
        with anyio.move_on_after(idle_s):
            await receive()  # the body was read: all that comes is the disconnect
            return
        await idle()


async def _send_json(send: Send, status: int, body: bytes, headers: Sequence[tuple[bytes, bytes]] = ()) -> None:
    shown = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()), *headers]
    await send({"type": "http.response.start", "status": status, "headers": shown})
    await send({"type": "http.response.body", "body": body, "more_body": False})
