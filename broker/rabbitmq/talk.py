"""Short-lived talk: announcements on a topic exchange, requests to queues that nobody keeps."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any, Final

import aiormq
import aiormq.exceptions
import anyio
import structlog
from aiormq.abc import DeliveredMessage
from pamqp.commands import Basic

from broker.errors import NotConnectedError, RequestFailedError, TooLargeError
from broker.iterating import Iterating
from broker.naming import check_literal, check_talk_subject
from broker.rabbitmq.beside import running_beside
from broker.rabbitmq.channel import Channel
from broker.rabbitmq.link import LOST, Link
from broker.rabbitmq.wire import MAX_MESSAGE_BYTES
from schemas.errors import InvalidIdError
from schemas.subjects import check_filter, matches

log = structlog.get_logger("broker")

EXCHANGE: Final = "hrt"
MAX_KEY_BYTES: Final = 240
"""AMQP's short strings end at 255."""
_FAILED: Final = "failed"
_NOBODY_WAIT_S: Final = 0.05


class Talk:
    """Speaks and asks on one channel each; listeners and servers have their own."""

    def __init__(self, link: Link) -> None:
        self._link: Final = link
        self._channel: Channel | None = None
        self._answers: dict[str, asyncio.Future[DeliveredMessage]] = {}
        self._ready = asyncio.Event()

    async def run(self) -> None:
        """Keep the channel on which this process speaks and hears answers, for ever."""
        while True:
            try:
                async with self._link.channel(confirms=True) as channel:
                    await channel.declare_exchange(EXCHANGE)
                    await channel.consume("amq.rabbitmq.reply-to", self._hear_answer, no_ack=True)
                    self._channel = channel
                    self._ready.set()
                    await channel.until_closed()
            except LOST as error:
                log.debug("talk lost its channel", reason=str(error))
            self._ready.clear()
            self._channel = None
            await anyio.sleep(0.05)

    async def announce(self, subject: str, data: bytes) -> None:
        """Tell whoever listens now; lost while the connection is away."""
        _check(subject, data)
        await self._link.wait_connected(self._link.settings.connect_deadline_s)
        channel = await self._speaking()
        with suppress(
            *LOST,
        ):  # as announcements go: not kept for later
            await channel.publish(data, Basic.Properties(delivery_mode=1), exchange=EXCHANGE, routing_key=subject)

    async def request(self, subject: str, data: bytes, deadline_s: float) -> bytes:
        """Ask one server of a subject; ask again only where nobody can have heard it."""
        _check(subject, data)
        until_s = time.monotonic() + deadline_s
        with anyio.move_on_after(deadline_s):
            while True:
                channel = await self._speaking()
                left_s = until_s - time.monotonic()
                try:
                    return await self._ask(channel, subject, data, left_s)
                except aiormq.exceptions.PublishError:
                    await anyio.sleep(_NOBODY_WAIT_S)  # nobody serves it yet
                except LOST as error:
                    raise NotConnectedError(f"the connection broke while {subject!r} was asked: {error}") from error
        raise NotConnectedError(f"expected an answer on {subject!r} within {deadline_s} s, found none")

    async def _ask(self, channel: Channel, subject: str, data: bytes, left_s: float) -> bytes:
        correlation = secrets.token_hex(8)
        answer: asyncio.Future[DeliveredMessage] = asyncio.get_running_loop().create_future()
        self._answers[correlation] = answer
        try:
            labels = Basic.Properties(
                delivery_mode=1,
                correlation_id=correlation,
                reply_to="amq.rabbitmq.reply-to",
                expiration=str(max(int(left_s * 1000), 1)),
            )
            await channel.publish(data, labels, routing_key=_server_queue(subject), mandatory=True)
            await asyncio.wait((answer, channel.closing), return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                raise ConnectionResetError("no answer can come any more")
            message = answer.result()
        finally:
            del self._answers[correlation]
        if (message.header.properties.headers or {}).get(_FAILED):
            raise RequestFailedError(
                f"{subject!r} was answered with an error: {bytes(message.body).decode('utf-8', 'replace')}"
            )
        return bytes(message.body)

    async def _hear_answer(self, message: DeliveredMessage) -> None:
        answer = self._answers.get(message.header.properties.correlation_id or "")
        if answer is not None and not answer.done():
            answer.set_result(message)

    async def _speaking(self) -> Channel:
        while self._channel is None:
            await self._ready.wait()
        return self._channel

    @asynccontextmanager
    async def listen(self, pattern: str) -> AsyncGenerator[AsyncIterator[tuple[str, bytes]]]:
        """What is announced from now on."""
        check_filter(pattern)
        check_talk_subject(pattern)
        heard: deque[tuple[str, bytes]] = deque(maxlen=self._link.settings.listen_buffer)
        arrived = asyncio.Event()

        async def hear(message: DeliveredMessage) -> None:
            subject = str(message.routing_key or "")
            if matches(pattern, subject):
                heard.append((subject, bytes(message.body)))
                arrived.set()

        async def open_ears(channel: Channel) -> None:
            queue = await self._own_queue(channel)
            await channel.bind(queue, EXCHANGE, _binding(pattern))
            await channel.consume(queue, hear, no_ack=True)

        async def take() -> tuple[str, bytes]:
            while not heard:
                arrived.clear()
                await arrived.wait()
            return heard.popleft()

        async with self._kept(open_ears):
            yield Iterating(take)

    async def _own_queue(self, channel: Channel) -> str:
        await channel.declare_exchange(EXCHANGE)
        arguments: dict[str, Any] = {"x-max-length": self._link.settings.listen_buffer, "x-overflow": "drop-head"}
        name, _ = await channel.declare("", exclusive=True, auto_delete=True, arguments=arguments)
        return name

    @asynccontextmanager
    async def serve(self, subject: str, handler: Callable[[bytes], Awaitable[bytes]]) -> AsyncGenerator[None]:
        """Answer requests while the context is open."""
        check_literal(subject)
        check_talk_subject(subject)
        queue = _server_queue(subject)

        async def open_door(channel: Channel) -> None:
            async def answer(message: DeliveredMessage) -> None:
                failed: dict[str, Any] = {}
                try:
                    body = await handler(bytes(message.body))
                except Exception as error:  # noqa: BLE001 - whoever asked gets the text; the handler's owner decides nothing
                    failed, body = {_FAILED: True}, str(error).encode()
                asked = message.header.properties
                with suppress(
                    *LOST,
                ):  # whoever asked sees its deadline
                    labels = Basic.Properties(delivery_mode=1, correlation_id=asked.correlation_id, headers=failed)
                    await channel.publish(body, labels, routing_key=asked.reply_to or "")
                    await channel.ack(message, wait=False)

            await channel.declare(queue, auto_delete=True)
            await channel.qos(self._link.settings.serve_concurrency)
            await channel.consume(queue, answer)

        async with self._kept(open_door):
            yield

    @asynccontextmanager
    async def _kept(self, set_up: Callable[[Channel], Awaitable[None]]) -> AsyncGenerator[None]:
        """A channel that is set up now and again after each loss."""
        up = asyncio.Event()

        async def keep() -> None:
            while True:
                try:
                    async with self._link.channel() as channel:
                        await set_up(channel)
                        up.set()
                        await channel.until_closed()
                except LOST as error:
                    log.debug("a channel for talk was lost", reason=str(error))
                await anyio.sleep(0.05)

        async with running_beside() as tasks:
            tasks.start_soon(keep)
            await up.wait()
            yield


def _server_queue(subject: str) -> str:
    return f"{EXCHANGE}.ask.{subject}"


def _binding(pattern: str) -> str:
    """NATS's pattern in RabbitMQ's words, perhaps wider: what arrives is matched again."""
    return ".".join("#" if token == ">" else token for token in pattern.split("."))


def _check(subject: str, data: bytes) -> None:
    check_literal(subject)
    check_talk_subject(subject)
    if len(subject.encode()) > MAX_KEY_BYTES:
        raise InvalidIdError(
            f"expected a subject of at most {MAX_KEY_BYTES} bytes, found {len(subject)}: '{subject[:80]}…'"
        )
    if len(data) > MAX_MESSAGE_BYTES:
        raise TooLargeError(f"{subject!r}: expected at most {MAX_MESSAGE_BYTES} bytes, found {len(data)}")
