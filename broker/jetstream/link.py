"""A connection that is renewed for ever, and questions on it that always end: with an answer, with its loss, or late.

Its state can be seen at any time. It must not know what is asked.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
import ssl
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Final, TypedDict

import anyio
import msgspec
import nats.errors
import structlog

from broker.errors import NotConnectedError
from broker.jetstream.headers import LINE
from broker.jetstream.wire import WireClient, check_client
from broker.settings import ConnectSettings, read_secret

SWEEP_S: Final = 0.25
"""How exactly the deadlines of questions are kept."""
BUFFER_HIGH_BYTES: Final = 4 * 1024 * 1024
"""More than this unsent makes senders wait."""
BUFFER_AWAY_BYTES: Final = 2 * 1024 * 1024
"""While away, commands that may be lost (acks) are kept up to this much."""


class Answer(msgspec.Struct, frozen=True, gc=False):
    """What came back on a question."""

    data: bytes
    headers: bytes | None


class ConnectionState(msgspec.Struct, frozen=True, kw_only=True):
    """What a connection is doing."""

    connected: bool
    url: str
    since_unix_s: float
    """When it came into this state."""
    reconnects: int
    last_error: str
    waiting_answers: int
    unsent_bytes: int


class LinkLostError(Exception):
    """The connection broke while an answer was awaited: it may or may not have been acted on."""


class NoAnswerError(Exception):
    """No answer in time: it may or may not have been acted on."""


class Link:
    """One connection. Made by `open_link`."""

    def __init__(self, client: WireClient, settings: ConnectSettings, name: str) -> None:
        self.client = client
        self.settings = settings
        self.log: structlog.stdlib.BoundLogger = structlog.get_logger("broker").bind(connection=name)
        self._inbox = f"_INBOX.{secrets.token_hex(11)}"
        self._tokens = itertools.count()
        self._waiting: dict[bytes, tuple[asyncio.Future[Answer], float]] = {}
        self._connected = anyio.Event()
        self._since = time.time()
        self._last_error = ""
        self._reconnects = 0
        self._on_reconnect: dict[int, Callable[[], None]] = {}
        self._on_sweep: dict[int, Callable[[], None]] = {}
        self.fatal: NotConnectedError | None = None
        self.closing = False
        self._sweep: asyncio.TimerHandle | None = None

    def state(self) -> ConnectionState:
        """What the connection is doing now."""
        url = self.client.connected_url
        return ConnectionState(
            connected=self.client.is_connected,
            url="" if url is None else f"{url.scheme}://{url.hostname}:{url.port}",
            since_unix_s=self._since,
            reconnects=self._reconnects,
            last_error=self._last_error,
            waiting_answers=len(self._waiting),
            unsent_bytes=self.client.pending_data_size,
        )

    def new_inbox(self) -> str:
        """A subject that nobody else listens to."""
        return f"{self._inbox}.i{next(self._tokens)}"

    def on_reconnect(self, wake: Callable[[], None]) -> Callable[[], None]:
        """Call `wake` after each reconnection, until the returned function is called."""
        return _register(self._on_reconnect, next(self._tokens), wake)

    def on_sweep(self, look: Callable[[], None]) -> Callable[[], None]:
        """Call `look` every SWEEP_S, until the returned function is called."""
        return _register(self._on_sweep, next(self._tokens), look)

    async def wait_connected(self, deadline_s: float) -> None:
        """Wait for the connection.

        Raises:
            NotConnectedError: not within the deadline.
        """
        if self.client.is_connected:
            return
        with anyio.move_on_after(deadline_s):
            while not self.client.is_connected:
                if self.client.is_closed:
                    raise NotConnectedError(f"the connection is closed: {self._last_error or 'by its owner'}")
                await self._connected.wait()
            return
        raise NotConnectedError(
            f"expected a connection to the broker within {deadline_s:.1f} s, found none: {self._last_error}"
        )

    async def ask(
        self, subject: str, data: bytes | memoryview = b"", *, headers: bytes = b"", timeout_s: float
    ) -> Answer:
        """Send a question and wait for its answer.

        Args:
            subject: Where to.
            data: The question.
            headers: Header lines without the first line and the end.
            timeout_s: How long to wait for the answer.

        Raises:
            LinkLostError, NoAnswerError: unknown whether it was acted on.
        """
        token = b"%x" % next(self._tokens)
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting[token] = (future, time.monotonic() + timeout_s)
        try:
            self._send(subject, f"{self._inbox}.{token.decode()}", data, headers)
            if self.client.pending_data_size > BUFFER_HIGH_BYTES:
                with anyio.move_on_after(timeout_s):
                    await self.client.written()
            return await future
        finally:
            del self._waiting[token]

    def tell(self, subject: str, data: bytes, *, reply: str = "", headers: bytes = b"") -> bool:
        """Send without waiting; False if it was dropped because the connection is away for long."""
        if not self.client.is_connected and self.client.pending_data_size > BUFFER_AWAY_BYTES:
            return False
        self._send(subject, reply, data, headers)
        return True

    def _send(self, subject: str, reply: str, data: bytes | memoryview, headers: bytes) -> None:
        if headers:
            size = len(LINE) + 2 + len(headers) + 2
            start = (
                f"HPUB {subject} {reply} {size} {size + len(data)}\r\n".encode() + LINE + b"\r\n" + headers + b"\r\n"
            )
        else:
            start = f"PUB {subject} {reply} {len(data)}\r\n".encode()
        if len(data) < 16 * 1024:
            self.client.send_nowait(b"%b%b\r\n" % (start, data))
        else:
            self.client.send_parts_nowait((start, data, b"\r\n"), len(start) + len(data) + 2)

    def _answered(self, subject: bytes, _reply: bytes, data: bytes, headers: bytes | None) -> None:
        entry = self._waiting.get(subject[len(self._inbox) + 1 :])
        if entry is not None and not entry[0].done():
            entry[0].set_result(Answer(data, headers))

    async def round_trip(self) -> None:
        """Wait until the server has seen all that was sent before.

        Raises:
            NotConnectedError: the connection is away or broke meanwhile.
        """
        try:
            await self.client.flush()
        except nats.errors.Error as error:
            raise NotConnectedError(f"the server did not answer: {error}") from error

    async def start(self) -> None:
        """Listen for answers."""
        await self.client.subscribe_direct(f"{self._inbox}.*", self._answered)
        self.sweep()

    def sweep(self) -> None:
        """End questions whose time is over, now and again until `stop`."""
        now = time.monotonic()
        for future, until_s in list(self._waiting.values()):
            if until_s < now and not future.done():
                future.set_exception(NoAnswerError())
        for look in list(self._on_sweep.values()):
            look()
        self.client.revive()
        self._sweep = asyncio.get_running_loop().call_later(SWEEP_S, self.sweep)

    def stop(self) -> None:
        """No sweeping any more; what still waits is told that the connection is lost."""
        self.closing = True
        if self._sweep is not None:
            self._sweep.cancel()
        self._lose_answers()

    def _lose_answers(self) -> None:
        for future, _ in list(self._waiting.values()):
            if not future.done():
                future.set_exception(LinkLostError())

    async def disconnected(self) -> None:
        """nats-py's callback."""
        if self._connected.is_set():
            self._connected = anyio.Event()
        self._since = time.time()
        self._lose_answers()
        if not self.closing:
            self.log.warning("connection lost", error=self._last_error)

    async def connected(self) -> None:
        """nats-py's callback after a reconnection; called by `open_link` for the first."""
        self._since = time.time()
        self._connected.set()

    async def reconnected(self) -> None:
        """nats-py's callback."""
        self._reconnects += 1
        await self.connected()
        self.log.info("connected again", url=self.state().url, reconnects=self._reconnects)
        for wake in list(self._on_reconnect.values()):
            wake()

    async def failed(self, error: Exception) -> None:
        """nats-py's callback for what goes wrong in the background."""
        text = str(error) or type(error).__name__
        changed = text != self._last_error
        self._last_error = text
        if changed:
            self.log.warning("connection error", error=text)
        if "uthorization" in text and not self._connected.is_set():
            self.fatal = NotConnectedError(f"the broker refused these credentials: {text}")
            if self._reconnects == 0 and self.client.stats["in_msgs"] == 0:
                raise self.fatal


def _register(calls: dict[int, Callable[[], None]], key: int, call: Callable[[], None]) -> Callable[[], None]:
    calls[key] = call

    def forget() -> None:
        calls.pop(key, None)

    return forget


@asynccontextmanager
async def open_link(urls: list[str], settings: ConnectSettings, *, role: str = "") -> AsyncGenerator[Link]:
    """A connection to one of `urls`, for as long as the context is open.

    Raises:
        NotConnectedError: none of them within the deadline, or the credentials were refused.
    """
    check_client()
    client = WireClient()
    name = f"{settings.name} {role}".strip()
    link = Link(client, settings, name)
    await _connect(link, urls, settings, name)
    try:
        await link.start()
        yield link
    finally:
        link.stop()
        await _close(client, 2.0)


async def _connect(link: Link, urls: list[str], settings: ConnectSettings, name: str) -> None:
    options = _auth_options(settings)
    try:
        with anyio.fail_after(settings.connect_deadline_s):
            await link.client.connect(
                servers=urls,
                name=name,
                error_cb=link.failed,
                disconnected_cb=link.disconnected,
                reconnected_cb=link.reconnected,
                connect_timeout=2,
                max_reconnect_attempts=-1,
                reconnect_time_wait=settings.reconnect_wait_s,  # pyright: ignore[reportArgumentType] - a float sleeps as well
                ping_interval=settings.ping_interval_s,  # pyright: ignore[reportArgumentType] - same
                max_outstanding_pings=2,
                pending_size=64 * 1024 * 1024,
                **options,
            )
    except TimeoutError as error:
        await _close(link.client, 1.0)
        raise NotConnectedError(
            f"expected a NATS server at {', '.join(map(_without_secret, urls))} within {settings.connect_deadline_s} s, "
            f"found: {link.state().last_error or 'no answer'}"
        ) from error
    except ImportError as error:
        await _close(link.client, 1.0)
        raise NotConnectedError("credentials and nkeys need the package nkeys: pip install nkeys") from error
    except (nats.errors.Error, OSError, ValueError) as error:
        await _close(link.client, 1.0)
        raise NotConnectedError(f"can't connect to {', '.join(map(_without_secret, urls))}: {error}") from error
    except BaseException:
        await _close(link.client, 1.0)
        raise
    await link.connected()


async def _close(client: WireClient, deadline_s: float) -> None:
    """Send what is queued and close. A connection that breaks meanwhile is closed, too."""
    with anyio.CancelScope(shield=True), anyio.move_on_after(deadline_s), suppress(OSError, nats.errors.Error):
        if client.is_connected:
            await client.written()
        await client.close()


def _without_secret(url: str) -> str:
    scheme, _, rest = url.rpartition("://")
    return f"{scheme or 'nats'}://{rest.rpartition('@')[2]}"


class _Auth(TypedDict, total=False):
    user: str
    password: str
    token: str
    user_credentials: str
    nkeys_seed: str
    tls: ssl.SSLContext
    tls_hostname: str


def _auth_options(settings: ConnectSettings) -> _Auth:
    options = _Auth()
    if settings.user:
        options["user"] = settings.user
        options["password"] = read_secret(settings.password_file) if settings.password_file else ""
    if settings.token_file:
        options["token"] = read_secret(settings.token_file)
    if settings.creds_file:
        options["user_credentials"] = _existing(settings.creds_file)
    if settings.nkey_seed_file:
        options["nkeys_seed"] = _existing(settings.nkey_seed_file)
    if settings.tls_ca_file or settings.tls_cert_file:
        options["tls"] = _tls_context(settings)
    if settings.tls_hostname:
        options["tls_hostname"] = settings.tls_hostname
    return options


def _tls_context(settings: ConnectSettings) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=settings.tls_ca_file or None)
        if settings.tls_cert_file:
            context.load_cert_chain(settings.tls_cert_file, settings.tls_key_file or None)
    except (OSError, ssl.SSLError) as error:
        files = ", ".join(filter(None, (settings.tls_ca_file, settings.tls_cert_file, settings.tls_key_file)))
        raise NotConnectedError(f"TLS: can't use {files}: {error}") from error
    return context


def _existing(path: str) -> str:
    if not Path(path).is_file():
        raise NotConnectedError(f"expected a credentials file at {path}, found none")
    return path
