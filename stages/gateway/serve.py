"""Serves a gateway with uvicorn, guarded against clients that send their headers slowly or without end."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, ClassVar, Final, cast

import anyio
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from stages.gateway.gateway import Gateway
from stages.gateway.http import GatewayApp
from stages.gateway.settings import GatewayLimits

_SHUTDOWN_S = 3
_KEEP_ALIVE_S = 75
_HEADERS_TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


async def serve_gateway(
    gateway: Gateway,
    host: str = "127.0.0.1",
    port: int = 0,
    ready: Callable[[str], None] | None = None,
) -> None:
    """Serve until cancelled; `ready` gets the base URL once connections are accepted.

    Raises:
        OSError: the address can't be bound.
    """
    listening = socket.create_server((host, port), backlog=2048)
    with listening:
        bound_host, bound_port = listening.getsockname()[:2]
        base_url = gateway.settings.public_url or f"http://{bound_host}:{bound_port}"
        gateway.sessions.base_url = base_url
        server = _Server(_config(gateway))
        async with anyio.create_task_group() as tasks:
            await tasks.start(gateway.run)
            serving = asyncio.ensure_future(server.serve(sockets=[listening]))
            try:
                if ready is not None:
                    ready(base_url)
                await asyncio.shield(serving)
            finally:
                server.should_exit = True
                with anyio.move_on_after(_SHUTDOWN_S + 1, shield=True):
                    await serving
                tasks.cancel_scope.cancel()


def _config(gateway: Gateway) -> uvicorn.Config:
    limits = gateway.settings.limits
    return uvicorn.Config(
        GatewayApp(gateway),
        http=guarded_protocol(limits),
        lifespan="off",
        ws="none",
        access_log=False,
        proxy_headers=False,
        log_config=None,
        server_header=False,
        date_header=False,
        limit_concurrency=limits.max_connections,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=_SHUTDOWN_S,
    )


class _Server(uvicorn.Server):
    """Leaves signals to whoever runs the process."""

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """No handlers."""
        yield


def guarded_protocol(limits: GatewayLimits) -> type[HttpToolsProtocol]:
    """The server's protocol with a deadline and a bound for headers."""
    return type("Guarded", (_Guarded,), {"deadline_s": limits.header_deadline_s, "max_bytes": limits.max_header_bytes})


class _JoinedWrites:
    """A transport that sends what is written in one turn of the loop at once: the head of an answer with its body."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport: Final = transport
        self._loop: Final = loop
        self._held: Final[list[bytes]] = []

    def __getattr__(self, name: str) -> Any:  # Any: the transport's own attributes
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        """Hold; it goes out before the loop waits again."""
        if not self._held:
            self._loop.call_soon(self._flush)
        self._held.append(data)

    def close(self) -> None:
        """Send what is held, then close."""
        self._flush()
        self._transport.close()

    def _flush(self) -> None:
        if self._held:
            data = self._held[0] if len(self._held) == 1 else b"".join(self._held)
            self._held.clear()
            self._transport.write(data)


class _Guarded(HttpToolsProtocol):
    """Adds what uvicorn has not: headers must come within a deadline and a bound."""

    deadline_s: ClassVar[float]
    max_bytes: ClassVar[int]

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # Any: uvicorn's own signature, passed on
        super().__init__(*args, **kwargs)
        self._timer: asyncio.TimerHandle | None = None
        self._in_headers = True
        self._header_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] - as uvicorn narrows it
        # cast: what a protocol uses of a transport, all of which it has
        super().connection_made(cast("asyncio.Transport", _JoinedWrites(transport, self.loop)))
        self._await_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._in_headers:
            self._header_bytes += len(data)
            if self._header_bytes > self.max_bytes:
                self.transport.write(_HEADERS_TOO_LARGE)
                self.transport.close()

    def on_message_begin(self) -> None:
        self._await_headers()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._stop_timer()
        self._in_headers = False
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._in_headers, self._header_bytes = True, 0

    def _await_headers(self) -> None:
        self._stop_timer()
        self._in_headers = True
        self._timer = self.loop.call_later(self.deadline_s, self.transport.abort)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
