"""One connection to RabbitMQ that is renewed for ever; each part of the broker opens its channels anew after a loss.

It must not know what the channels are for.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from typing import Final
from urllib.parse import quote, urlsplit, urlunsplit

import aio_pika
import aiormq
import aiormq.exceptions
import anyio
import structlog
from aio_pika.abc import AbstractConnection

from broker.errors import BrokerError, NotAllowedError, NotConnectedError
from broker.rabbitmq.beside import running_beside
from broker.rabbitmq.channel import Channel, guarded
from broker.settings import ConnectSettings, read_secret
from broker.tls import tls_context

log = structlog.get_logger("broker")
# It logs every try to connect with a stack trace: what went wrong is told here, once.
logging.getLogger("aiormq.connection").setLevel(logging.CRITICAL)

LOST: Final = (aiormq.exceptions.AMQPError, aiormq.exceptions.ChannelInvalidStateError, ConnectionError, OSError)
"""What a broken connection raises: whatever was under way may or may not have happened."""
_OPEN_S: Final = 10.0
_CLOSE_S: Final = 5.0
"""aiormq waits two seconds for the server's farewell."""
_OF_NATS: Final = ("token_file", "creds_file", "nkey_seed_file", "tls_hostname")
HEARTBEAT_S: Final = 5
"""A server or client that is silent for two of these is given up; what it held goes to others."""


class ConnectionState:
    """What the connection is doing, for status."""

    def __init__(self) -> None:
        self.connected = False
        self.since_unix_s = time.time()
        self.reconnects = 0
        self.last_error = ""

    def set(self, *, connected: bool, error: str = "") -> None:
        """Note a change."""
        self.connected, self.since_unix_s = connected, time.time()
        self.last_error = error or self.last_error


class Link:
    """See the module. Made by `open_link`."""

    def __init__(self, urls: list[str], settings: ConnectSettings) -> None:
        self.settings: Final = settings
        self.state: Final = ConnectionState()
        _check_settings(settings)
        self._urls: Final = [_with_login(url, settings) for url in urls]
        self._tls: Final = tls_context(settings)
        self._connection: AbstractConnection | None = None
        self._connected = asyncio.Event()
        self._lost = asyncio.Event()
        self.url = ""

    async def connect(self) -> None:
        """Connect for the first time.

        Raises:
            NotConnectedError: no server within the deadline.
            NotAllowedError: the login is refused.
        """
        with anyio.move_on_after(self.settings.connect_deadline_s):
            while not await self._try_all():
                await anyio.sleep(self.settings.reconnect_wait_s)
            return
        raise NotConnectedError(
            f"expected a RabbitMQ at {', '.join(map(without_secret, self._urls))} within "
            f"{self.settings.connect_deadline_s} s, found: {self.state.last_error or 'no answer'}"
        )

    def again(self) -> Link:
        """One more to the same place, that `keep` is to connect."""
        other = Link(self._urls, self.settings)
        other._lost.set()
        return other

    async def keep(self) -> None:
        """Connect whenever there is no connection any more, for ever."""
        while True:
            await self._lost.wait()
            self._connected.clear()
            is_first = not self.url
            if not is_first:
                log.warning("connection lost; connecting again", broker=self.url, reason=self.state.last_error)
            while not await self._try_all():
                await anyio.sleep(self.settings.reconnect_wait_s)
            if not is_first:
                self.state.reconnects += 1
                log.info("connected again", broker=self.url)

    async def close(self) -> None:
        """Close for good."""
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(*LOST, TimeoutError):
                async with asyncio.timeout(2.0):
                    await guarded(connection.close())

    @asynccontextmanager
    async def channel(self, *, confirms: bool = False, prefetch: int = 0) -> AsyncGenerator[Channel]:
        """A channel of the present connection; waits for one.

        A connection that opens none is given up: RabbitMQ reads nothing more from one with some hundred publishes for a channel
        that is blocked, as by a queue without a leader, and both sides take it for sound.

        Raises:
            LOST: the connection broke meanwhile.
        """
        await self._connected.wait()
        connection = self._connection
        if connection is None:
            raise ConnectionResetError("the connection is closed")
        try:
            channel = connection.channel(publisher_confirms=confirms, on_return_raises=confirms)
            await guarded(channel.initialize(timeout=_OPEN_S))
        except RuntimeError as error:  # aiormq's own for a connection that has just ended
            raise ConnectionResetError(f"the connection closed meanwhile ({error})") from error
        except TimeoutError as error:
            await self._give_up(connection)
            raise ConnectionResetError("the connection opens no channel any more") from error
        try:
            found = Channel(await guarded(channel.get_underlay_channel()))
            if prefetch:
                await found.qos(prefetch)
            yield found
        finally:
            # What was written before (acknowledgements) goes out before the channel closes.
            with anyio.move_on_after(2.0, shield=True), suppress(*LOST):
                await guarded(channel.close())

    async def wait_connected(self, deadline_s: float) -> None:
        """Wait for the connection.

        Raises:
            NotConnectedError: not within the deadline.
        """
        with anyio.move_on_after(max(deadline_s, 0.0)):
            await self._connected.wait()
            return
        raise NotConnectedError(f"no connection to {self.url} for {deadline_s:.1f} s: {self.state.last_error}")

    async def _try_all(self) -> bool:
        for url in self._urls:
            try:
                connection = await guarded(
                    aio_pika.connect(
                        url,
                        timeout=3.0,
                        heartbeat=HEARTBEAT_S,
                        ssl_context=self._tls,
                        client_properties={"connection_name": self.settings.name},
                    )
                )
            except aiormq.exceptions.ProbableAuthenticationError as error:
                raise NotAllowedError(f"{without_secret(url)} refuses the login: {error}") from error
            except (*LOST, TimeoutError, StopAsyncIteration) as error:  # aiormq ends a broken handshake so
                self.state.set(connected=False, error=f"{type(error).__name__}: {error}"[:200])
                continue
            self._use(connection, url)
            return True
        return False

    def _use(self, connection: AbstractConnection, url: str) -> None:
        self._connection, self.url = connection, without_secret(url)
        self._lost = asyncio.Event()

        def closed(_sender: object, error: BaseException | None) -> None:
            self._lose(connection, f"{type(error).__name__}: {error}")

        connection.close_callbacks.add(closed)
        self.state.set(connected=True)
        self._connected.set()

    def _lose(self, connection: AbstractConnection, reason: str) -> None:
        """Note it, once; an earlier connection's end says nothing of the present one."""
        if connection is self._connection:
            self._connection = None
            self.state.set(connected=False, error=reason[:200])
            self._connected.clear()
            self._lost.set()

    async def _give_up(self, connection: AbstractConnection) -> None:
        self._lose(connection, "it opens no channel any more")
        with anyio.CancelScope(shield=True), anyio.move_on_after(_CLOSE_S), suppress(*LOST):
            await guarded(connection.close())


@asynccontextmanager
async def open_beside(link: Link) -> AsyncGenerator[Link]:
    """A connection of its own to where another one goes; made as soon as that can be. What breaks it breaks nothing else."""
    beside = link.again()
    try:
        async with running_beside() as tasks:
            tasks.start_soon(beside.keep)
            yield beside
    finally:
        with anyio.CancelScope(shield=True):
            await beside.close()


@asynccontextmanager
async def open_link(urls: list[str], settings: ConnectSettings) -> AsyncGenerator[Link]:
    """A connection for as long as the context is open.

    Raises:
        NotConnectedError, NotAllowedError; BrokerError: settings that RabbitMQ can't follow.
    """
    link = Link(urls, settings)
    await link.connect()
    try:
        async with running_beside() as tasks:
            tasks.start_soon(link.keep)
            yield link
    finally:
        with anyio.CancelScope(shield=True):
            await link.close()


def _check_settings(settings: ConnectSettings) -> None:
    names = [name for name in _OF_NATS if getattr(settings, name)]
    if names:
        raise BrokerError(
            f"expected user and password_file, or tls_cert_file, as the login to a RabbitMQ, found {', '.join(names)}"
        )


def without_secret(url: str) -> str:
    """A URL as it may be shown: no login, no query."""
    parts = urlsplit(url)
    place = parts.hostname or "localhost"
    return f"{parts.scheme}://{place}:{parts.port or 5672}{parts.path}"


def _with_login(url: str, settings: ConnectSettings) -> str:
    """The URL with the login of the settings, which goes before the URL's own, and without a query of ours."""
    parts = urlsplit(url)
    netloc = parts.netloc
    if settings.user:
        password = read_secret(settings.password_file) if settings.password_file else ""
        netloc = f"{quote(settings.user, safe='')}:{quote(password, safe='')}@{netloc.rpartition('@')[2]}"
    return urlunsplit((parts.scheme, netloc, parts.path or "/", parts.query, ""))
