"""A connection's bytes for nats-py: it writes and reads control lines as on its own transport, while messages go from the socket to
`deliver` without a task, a stream or a buffer between (`frames.py`).

It must not know what is said.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from typing import Final, cast
from urllib.parse import ParseResult

from nats.aio.transport import Transport

from broker.jetstream.frames import Deliver, Frames

_DEFAULT_PORT: Final = 4222
_NOT_CONNECTED: Final = "expected a connection to a broker, found none"


class WireTransport(Transport):
    """One server's connection after the other: `connect` begins a new one."""

    def __init__(self, deliver: Deliver) -> None:
        self._deliver = deliver
        self._connection: _Connection | None = None

    async def connect(self, uri: ParseResult, buffer_size: int, connect_timeout: int) -> None:  # noqa: ARG002 - nats-py's signature
        connection = _Connection(self._deliver)
        loop, address = asyncio.get_running_loop(), (uri.hostname or "", uri.port or _DEFAULT_PORT)
        async with asyncio.timeout(connect_timeout):  # wait_for can swallow the cancellation that ends a reconnection
            await loop.create_connection(lambda: connection, *address)
        self.close()  # a former one whose handshake failed
        self._connection = connection

    async def connect_tls(
        self,
        uri: str | ParseResult,
        ssl_context: ssl.SSLContext,
        buffer_size: int,  # noqa: ARG002 - nats-py's signature
        connect_timeout: int,
    ) -> None:
        """Go on in TLS on the connection that stands."""
        connection = self._connected()
        hostname = uri if isinstance(uri, str) else uri.hostname
        async with asyncio.timeout(connect_timeout):
            transport = await asyncio.get_running_loop().start_tls(
                connection.transport, connection, ssl_context, server_hostname=hostname
            )
        if transport is None:
            raise ConnectionResetError("the connection was lost while TLS began")
        connection.transport = transport

    def write(self, payload: bytes) -> None:
        self._connected().transport.write(payload)

    def writelines(self, payload: list[bytes]) -> None:
        self._connected().transport.writelines(payload)

    async def drain(self) -> None:
        await self._connected().drain()

    async def read(self, buffer_size: int) -> bytes:  # noqa: ARG002 - nats-py's signature
        """The control lines that have come; b"" at the end."""
        return await self._connected().lines()

    async def readline(self) -> bytes:
        """The next control line; b"" at the end."""
        return await self._connected().line()

    def at_eof(self) -> bool:
        return self._connection is None or self._connection.at_eof

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()

    async def wait_closed(self) -> None:
        if self._connection is not None:
            await self._connection.wait_closed()

    def __bool__(self) -> bool:  # pyright: ignore[reportIncompatibleMethodOverride] - nats-py's has no annotation and an empty body
        return True  # nats-py would put a transport of its own in the place of one that is false

    def _connected(self) -> _Connection:
        if self._connection is None:
            raise ConnectionResetError(_NOT_CONNECTED)
        return self._connection


class _Connection(asyncio.BufferedProtocol):
    """One socket."""

    transport: asyncio.Transport

    def __init__(self, deliver: Deliver) -> None:
        self._deliver = deliver
        self._frames = Frames(self._pass_on, self._control)
        self._lines: deque[bytes] = deque()
        self._reader: asyncio.Future[None] | None = None
        self._writable: asyncio.Future[None] | None = None
        """Pending while the socket takes no more."""
        self._closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._lost: Exception | None = None
        self._ended = False
        self._deaf = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)  # cast: a stream's, in uvloop without being a subclass

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002 - asyncio's signature
        return self._frames.space()

    def buffer_updated(self, nbytes: int) -> None:
        self._frames.filled(nbytes)

    def _pass_on(self, sid: int, subject: bytes, reply: bytes, data: bytes | memoryview, headers: bytes | None) -> None:
        if not self._deaf:
            self._deliver(sid, subject, reply, data, headers)

    def _control(self, line: bytes) -> None:
        self._lines.append(line)
        self._wake_reader()

    def _wake_reader(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    async def _come(self) -> bool:
        """Wait for a line; False at the end.

        Raises:
            OSError: the connection broke.
        """
        while not self._lines and not self._ended:
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        if not self._lines and self._lost is not None:
            raise _as_os_error(self._lost)
        return bool(self._lines)

    async def line(self) -> bytes:
        """The next one; b"" at the end."""
        return self._lines.popleft() if await self._come() else b""

    async def lines(self) -> bytes:
        """All that have come; b"" at the end."""
        if not await self._come():
            return b""
        found = b"".join(self._lines)
        self._lines.clear()
        return found

    @property
    def at_eof(self) -> bool:
        """Whether nothing comes any more, and all was read."""
        return self._ended and not self._lines and self._lost is None

    def eof_received(self) -> None:
        self._end()

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost = exc
        self._end()
        self.resume_writing()
        if not self._closed.done():
            self._closed.set_result(None)

    def _end(self) -> None:
        self._ended = True
        self._wake_reader()

    def pause_writing(self) -> None:
        if self._writable is None:
            self._writable = asyncio.get_running_loop().create_future()

    def resume_writing(self) -> None:
        writable, self._writable = self._writable, None
        if writable is not None and not writable.done():
            writable.set_result(None)

    async def drain(self) -> None:
        """Wait until the socket takes more.

        Raises:
            ConnectionResetError: it is gone.
        """
        if self._writable is not None:
            await asyncio.shield(self._writable)
        elif self.transport.is_closing():
            await asyncio.sleep(0)  # let the loop tell what became of it
        if self._closed.done():
            raise ConnectionResetError("the connection to the broker is lost")

    def close(self) -> None:
        """Send what is queued and end; nothing is delivered any more."""
        self._deaf = True
        self.transport.close()

    async def wait_closed(self) -> None:
        """Wait for the end.

        Raises:
            OSError: the connection broke.
        """
        await asyncio.shield(self._closed)
        if self._lost is not None:
            raise _as_os_error(self._lost)


def _as_os_error(error: Exception) -> OSError:
    """What nats-py takes for the loss of a connection."""
    return error if isinstance(error, OSError) else ConnectionResetError(f"the connection broke: {error!r}")
