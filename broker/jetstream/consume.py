"""A worker's share of a durable's messages."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager

import anyio

from broker.api import ConsumerSettings, Delivery
from broker.errors import NoSuchStreamError, TopologyError
from broker.iterating import Iterating
from broker.jetstream.api import ApiError, Code, call
from broker.jetstream.link import Link
from broker.jetstream.pull import Pull, Raw
from broker.shapes import ConsumerInfo
from broker.topology import DurableSpec, difference, durable_body, durable_spec

BACK_OFF_S = 0.25


class JetStreamDelivery:
    """A `Delivery` of JetStream."""

    __slots__ = ("_link", "_numbers", "_open", "_pull", "_reply", "data", "subject")

    def __init__(self, link: Link, pull: Pull, raw: Raw) -> None:
        self._link = link
        self._pull = pull
        self._reply = raw.reply
        self._numbers: tuple[int, int, int, int, int] | None = None
        self.subject = raw.subject.decode("utf-8", "replace")  # a foreign client's may be anything
        self.data = raw.data
        self._open = True

    @property
    def sequence(self) -> int:
        return self._parsed()[1]

    @property
    def num_delivered(self) -> int:
        return self._parsed()[0]

    def _parsed(self) -> tuple[int, int, int, int, int]:
        if self._numbers is None:
            self._numbers = ack_numbers(self._reply)
        return self._numbers

    async def ack(self) -> None:
        self._link.client.send_nowait(b"PUB %b 4\r\n+ACK\r\n" % self._reply)
        self._settle()

    async def retry(self, delay_s: float) -> None:
        body = b'-NAK {"delay": %d}' % int(delay_s * 1e9) if delay_s > 0 else b"-NAK"
        self._link.client.send_nowait(b"PUB %b %d\r\n%b\r\n" % (self._reply, len(body), body))
        self._settle()

    async def still_working(self) -> None:
        self._link.client.send_nowait(b"PUB %b 4\r\n+WPI\r\n" % self._reply)

    def _settle(self) -> None:
        if self._open:
            self._open = False
            self._pull.settled()

    def __del__(self) -> None:
        # Forgotten without a word: the server delivers it again after ack_wait, but the room it took here is free.
        if self._open:
            self._open = False
            self._pull.forgotten()


def ack_numbers(reply: bytes) -> tuple[int, int, int, int, int]:
    """From an ack subject: deliveries, stream sequence, consumer sequence, time in ns, messages still pending."""
    tokens = reply.split(b".")
    first = 4 if len(tokens) == 9 else 6  # with a domain and an account in front
    n = [int(token) for token in tokens[first : first + 5]]
    return n[0], n[1], n[2], n[3], n[4]


async def ensure_durable(link: Link, stream: str, wanted: DurableSpec) -> None:
    """Create a durable unless it stands there as wanted.

    Raises:
        TopologyError: it stands there with other settings.
        NoSuchStreamError: the run has no log.
    """
    try:
        info = await call(link, f"CONSUMER.INFO.{stream}.{wanted.name}", None, ConsumerInfo)
    except ApiError as error:
        if error.err_code == Code.STREAM_NOT_FOUND:
            raise NoSuchStreamError(f"expected the stream {stream} on this broker, found none") from error
        if error.err_code != Code.CONSUMER_NOT_FOUND:
            raise
        try:
            info = await call(
                link, f"CONSUMER.CREATE.{stream}.{wanted.name}", durable_body(stream, wanted), ConsumerInfo
            )
        except ApiError as refused:
            if refused.err_code == Code.STREAM_NOT_FOUND:
                raise NoSuchStreamError(f"expected the stream {stream} on this broker, found none") from refused
            raise TopologyError(f"durable {wanted.name} can't be made: {refused}") from refused
    changes = difference(wanted, durable_spec(info.name, info.config), f"durable {wanted.name}")
    if changes:
        raise TopologyError("; ".join(changes) + ". Apply the topology again or use another durable name")


@asynccontextmanager
async def consume(
    link: Link, stream: str, durable: str, filters: tuple[str, ...], settings: ConsumerSettings, replicas: int
) -> AsyncGenerator[AsyncIterator[Delivery]]:
    """Pull from a durable."""
    wanted = DurableSpec(
        name=durable,
        filters=list(filters),
        ack_wait_s=settings.ack_wait_s,
        max_ack_pending=settings.max_ack_pending,
        replicas=replicas,
    )
    last_s, last_reply = 0.0, b""

    async def recover(reason: str) -> str:
        nonlocal last_s
        if reason and time.monotonic() - last_s < BACK_OFF_S:
            await anyio.sleep(BACK_OFF_S)
        last_s = time.monotonic()
        try:
            await ensure_durable(link, stream, wanted)
        except NoSuchStreamError as error:
            if not last_reply:
                raise
            seen = ack_numbers(last_reply)[1]
            raise NoSuchStreamError(f"{error}: lost with all messages up to at least sequence {seen}") from error
        return f"{stream}.{durable}"

    pull = Pull(
        link,
        prefetch=settings.prefetch,
        max_bytes=settings.max_bytes,
        recover=recover,
        ack_wait_s=settings.ack_wait_s,
    )

    async def take() -> Delivery:
        nonlocal last_reply
        raw = await pull.next()
        last_reply = raw.reply
        return JetStreamDelivery(link, pull, raw)

    try:
        await pull.open()
        yield Iterating(take)
    finally:
        with anyio.CancelScope(shield=True), anyio.move_on_after(2):
            await pull.close()
