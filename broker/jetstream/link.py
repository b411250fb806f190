"""A connection that is renewed for ever, and questions on it that always end: with an answer, with its loss, or late.

Its state can be seen at any time. In a cluster it hears when a leader is elected, and asks it at once what nobody had
answered. It must not know what is asked.
"""

from __future__ import annotations

import asyncio
import itertools
import re
import secrets
import time
from collections.abc import Callable, Mapping
from typing import Final, TypeVar

import anyio
import msgspec
import nats.errors
import structlog
from nats.aio.subscription import Subscription

from broker.errors import NotAllowedError, NotConnectedError
from broker.jetstream.headers import LINE
from broker.jetstream.questions import Again, Answer, Question, concerning
from broker.jetstream.wire import Handler, WireClient
from broker.settings import ConnectSettings

C = TypeVar("C")
SWEEP_S: Final = 0.25
"""How exactly the deadlines of questions are kept."""
_PERMISSION: Final = re.compile(
    r'permissions violation for (?P<what>publish|subscription) to "(?P<subject>[^"]+)"', re.IGNORECASE
)
BUFFER_HIGH_BYTES: Final = 4 * 1024 * 1024
"""More than this unsent makes senders wait."""
PARTS_FROM_BYTES: Final = 16 * 1024
BUFFER_AWAY_BYTES: Final = 2 * 1024 * 1024
"""While away, commands that may be lost (acks) are kept up to this much."""
ELECTED: Final = "$JS.EVENT.ADVISORY.{}.LEADER_ELECTED.{}"
"""What a cluster tells when a stream (STREAM) or a consumer of it (CONSUMER) has a new leader."""
LISTENS_S: Final = 0.05
"""A leader is told of before it listens."""


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
        self._inbox = f"{settings.inbox_prefix}.{secrets.token_hex(11)}"
        self._tokens = itertools.count()
        self._waiting: dict[bytes, Question] = {}
        self._refused: set[str] = set()
        self._connected = anyio.Event()
        self._since = time.time()
        self._last_error = ""
        self._reconnects = 0
        self._on_reconnect: dict[int, Callable[[], None]] = {}
        self._on_sweep: dict[int, Callable[[], None]] = {}
        self._on_elected: dict[int, Callable[[str], None]] = {}
        self._prefixes: dict[str, str] = {}
        self.replicated = False
        """Whether its streams have replicas, which may lag: what one of them does not have may stand all the same."""
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

    def on_elected(self, wake: Callable[[str], None]) -> Callable[[], None]:
        """Call `wake` with `<stream>.<consumer>` when a consumer has a new leader, until the returned function is called."""
        return _register(self._on_elected, next(self._tokens), wake)

    async def follow_leaders(self, streams: Mapping[str, str]) -> None:
        """Hear of new leaders. Without the right to, what nobody answered is asked again in its own time.

        Args:
            streams: Stream → the prefix of the subjects that it stores.
        """
        self.replicated = True
        for stream, prefix in streams.items():
            self._prefixes[stream] = prefix
            for subject in (ELECTED.format("STREAM", stream), ELECTED.format("CONSUMER", f"{stream}.*")):
                try:
                    await self.subscribe(subject, self._elected)
                except NotAllowedError as error:
                    self.log.debug("new leaders are not heard of", reason=str(error))

    def _elected(self, subject: bytes, _reply: bytes, _data: bytes | memoryview, _headers: bytes | None) -> None:
        stream, _, consumer = subject.decode().split(".", 5)[5].partition(".")
        self.log.debug("a leader was elected", stream=stream, consumer=consumer)
        asyncio.get_running_loop().call_later(LISTENS_S, self._ask_new_leader, stream, consumer)

    def _ask_new_leader(self, stream: str, consumer: str) -> None:
        now_s = time.monotonic()
        for question in concerning(self._waiting.values(), stream, self._prefixes[stream], consumer):
            question.hurry(now_s)
        self._ask_again(now_s)
        if consumer:
            for wake in list(self._on_elected.values()):
                wake(f"{stream}.{consumer}")

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
        self,
        subject: str,
        data: bytes | memoryview = b"",
        *,
        headers: bytes = b"",
        timeout_s: float,
        again: Again | None = None,
    ) -> Answer:
        """Send a question and wait for its answer.

        Args:
            subject: Where to.
            data: The question.
            headers: Header lines without the first line and the end.
            timeout_s: How long to wait for the answer.
            again: When to send it again meanwhile; None: never.

        Raises:
            LinkLostError, NoAnswerError: unknown whether it was acted on.
        """
        token = b"%x" % next(self._tokens)
        parts = _command(subject, f"{self._inbox}.{token.decode()}", data, headers)
        question = Question(subject, parts, now_s=time.monotonic(), timeout_s=timeout_s, again=again)
        self._waiting[token] = question
        try:
            self._put_question(question)
            if self.client.pending_data_size > BUFFER_HIGH_BYTES:
                with anyio.move_on_after(timeout_s):
                    await self.client.written()
            return await question.future
        finally:
            del self._waiting[token]

    def _put_question(self, question: Question) -> None:
        question.asked(time.monotonic())
        self._send(question.parts)

    def _ask_again(self, now_s: float) -> None:
        for question in list(self._waiting.values()):
            if not self.client.is_connected or self.client.pending_data_size > BUFFER_HIGH_BYTES:
                return
            if question.is_due(now_s):
                self._put_question(question)

    def tell(self, subject: str, data: bytes, *, reply: str = "", headers: bytes = b"") -> bool:
        """Send without waiting; False if it was dropped because the connection is away for long."""
        if not self.client.is_connected and self.client.pending_data_size > BUFFER_AWAY_BYTES:
            return False
        self._send(_command(subject, reply, data, headers))
        return True

    def _send(self, parts: tuple[bytes | memoryview, ...]) -> None:
        if len(parts) == 1:
            self.client.send_nowait(bytes(parts[0]))
        else:
            self.client.send_parts_nowait(parts, sum(map(len, parts)))

    def _answered(self, subject: bytes, _reply: bytes, data: bytes | memoryview, headers: bytes | None) -> None:
        question = self._waiting.get(subject[len(self._inbox) + 1 :])
        if question is not None:
            question.answer(data, headers)

    async def round_trip(self) -> None:
        """Wait until the server has seen all that was sent before.

        Raises:
            NotConnectedError: the connection is away or broke meanwhile.
        """
        try:
            # The client writes its PING ahead of what still waits in its own buffer: the first answer comes when that buffer
            # was written, the second when the server has read it.
            await self.client.flush()
            await self.client.flush()
        except nats.errors.Error as error:
            raise NotConnectedError(f"the server did not answer: {error}") from error

    async def start(self) -> None:
        """Listen for answers."""
        await self.subscribe(f"{self._inbox}.*", self._answered)
        self.sweep()

    async def subscribe(self, subject: str, handler: Handler, *, queue: str = "") -> Subscription:
        """Give what comes on `subject` to `handler`; returns when the server knows of it.

        Raises:
            NotAllowedError: these credentials may not hear it.
            NotConnectedError: the connection is away.
        """
        subscription = await self.client.subscribe_direct(subject, handler, queue=queue)
        await self.round_trip()
        if subject.lower() in self._refused:
            self._refused.discard(subject.lower())
            self.client.forget(subscription)
            raise NotAllowedError(f"these credentials may not subscribe to {subject!r}")
        return subscription

    def sweep(self) -> None:
        """End questions whose time is over, now and again until `stop`."""
        now = time.monotonic()
        for question in list(self._waiting.values()):
            if question.until_s < now:
                question.fail(NoAnswerError())
        self._ask_again(now)
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
        for question in list(self._waiting.values()):
            question.fail(LinkLostError())

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
        if changed and "consumer.delete" not in text:  # a reader may lack that right: its consumer ends by itself
            self.log.warning("connection error", error=text)
        self._tell_what_is_refused(text)
        if "uthorization" in text and not self._connected.is_set():
            self.fatal = NotConnectedError(f"the broker refused these credentials: {text}")
            if self._reconnects == 0 and self.client.stats["in_msgs"] == 0:
                raise self.fatal

    def _tell_what_is_refused(self, text: str) -> None:
        """The server says it without naming the question, and in small letters."""
        match = _PERMISSION.search(text)
        if match is None:
            return
        if match["what"] == "subscription":
            self._refused.add(match["subject"])
            return
        for question in list(self._waiting.values()):
            if question.subject.lower() == match["subject"]:
                question.fail(NotAllowedError(f"these credentials may not publish to {question.subject!r}"))


def _register(calls: dict[int, C], key: int, call: C) -> Callable[[], None]:
    calls[key] = call

    def forget() -> None:
        calls.pop(key, None)

    return forget


def _command(subject: str, reply: str, data: bytes | memoryview, headers: bytes) -> tuple[bytes | memoryview, ...]:
    """A protocol command, in parts where the data is large, so that it isn't copied."""
    if headers:
        size = len(LINE) + 2 + len(headers) + 2
        start = f"HPUB {subject} {reply} {size} {size + len(data)}\r\n".encode() + LINE + b"\r\n" + headers + b"\r\n"
    else:
        start = f"PUB {subject} {reply} {len(data)}\r\n".encode()
    return (b"%b%b\r\n" % (start, data),) if len(data) < PARTS_FROM_BYTES else (start, data, b"\r\n")
