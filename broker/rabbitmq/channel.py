"""A channel whose calls fail as calls do.

aiormq ends whatever waits on a channel that closes by cancelling it, with error objects that several tasks share. In a task
group such a cancellation nobody asked for ends a task silently, and shared errors that name each other as their context
hang it. Here every call runs in a task of its own, and its end by a lost channel is a ConnectionResetError.

RabbitMQ forgets messages that a channel gave to a stream whose writer was replaced in that moment, as after a crash, and what
the channel gives it later, too (3.10.8): it stays open and confirms nothing more. So a channel that is silent is given up, and one
that leaves a call unanswered, and one whose consumer RabbitMQ cancelled, as when its queue was deleted: nothing more comes there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Final, TypeVar

from aiormq.abc import AbstractChannel, DeliveredMessage
from pamqp.commands import Basic

SILENT_S: Final = 10.0
"""A channel that confirms nothing, or answers nothing, for so long while something waits for it."""

T = TypeVar("T")
Callback = Callable[[DeliveredMessage], Coroutine[Any, Any, Any]]  # Any: aiormq's own signature


class SilentError(ConnectionResetError):
    """Nothing is confirmed or answered any more."""


async def guarded(
    call: Awaitable[T],
    left_s: Callable[[], float] | None = None,
    closing: asyncio.Future[None] | None = None,
) -> T:
    """The result of a call into aiormq or aio-pika.

    Args:
        call: the call.
        left_s: how long it may go on waiting, from now; None: for ever.
        closing: ends it when it is done: a call that waits for room to write in a connection that is gone waits for ever.

    Raises:
        ConnectionResetError: it was ended by a closing channel or connection.
        SilentError: its time is over.
    """
    task = asyncio.ensure_future(call)
    ends = (task,) if closing is None else (task, closing)
    try:
        while not task.done():
            if closing is not None and closing.done():
                raise ConnectionResetError("the channel closed, or confirms nothing any more")
            timeout_s = None if left_s is None else left_s()
            if timeout_s is not None and timeout_s <= 0:
                raise SilentError("the channel confirms nothing and answers nothing any more")
            await asyncio.wait(ends, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        if not task.done():
            task.add_done_callback(_forget)
            task.cancel()
    if task.cancelled():
        raise ConnectionResetError("the channel or connection closed meanwhile")
    error = task.exception()
    if (
        isinstance(error, asyncio.InvalidStateError) or type(error) is Exception
    ):  # aiormq's own for a call that nobody will answer
        raise ConnectionResetError(f"the channel closed meanwhile ({error})")
    return task.result()


def _forget(task: asyncio.Future[Any]) -> None:  # Any: whatever it ended with, nobody waits for it
    if not task.cancelled():
        task.exception()


class Channel:
    """What is used of an AMQP channel."""

    def __init__(self, under: AbstractChannel, *, silent_s: float = SILENT_S) -> None:
        self._under: Final = under
        self._silent_s: Final = silent_s
        self._confirmed_s = 0.0
        """When something was confirmed last, by the loop's clock."""
        self.closing: Final[asyncio.Future[None]] = asyncio.get_running_loop().create_future()
        """Done when the channel is gone, or of no use any more."""
        under.closing.add_done_callback(self._give_up)
        under.on_consumer_cancel_callbacks.add(self._give_up)

    async def until_closed(self) -> None:
        """Return when it is gone, with its connection or alone, or is of no use any more."""
        await asyncio.wait((self.closing,))

    def _give_up(self, _cause: object = None) -> None:
        if not self.closing.done():
            self.closing.set_result(None)

    async def publish(
        self,
        body: bytes,
        properties: Basic.Properties,
        *,
        exchange: str = "",
        routing_key: str,
        mandatory: bool = False,
    ) -> None:
        """Publish; on a channel with confirms, return when it is confirmed.

        Raises:
            ConnectionResetError: the channel is gone, or confirms nothing any more; the message may stand all the same.
        """
        loop = asyncio.get_running_loop()
        since_s = loop.time()

        def left_s() -> float:
            return self._silent_s - (loop.time() - max(since_s, self._confirmed_s))

        call = self._under.basic_publish(
            body, exchange=exchange, routing_key=routing_key, properties=properties, mandatory=mandatory
        )
        await self._call(call, left_s)
        self._confirmed_s = loop.time()

    async def ack(self, message: DeliveredMessage, *, multiple: bool = False, wait: bool = True) -> None:
        """Acknowledge; with `wait`, return when it is written."""
        await self._answered(self._under.basic_ack(message.delivery_tag or 0, multiple=multiple, wait=wait))

    async def consume(self, queue: str, callback: Callback, *, no_ack: bool = False, offset: int | None = None) -> None:
        """Begin to receive, from a stream at an offset."""
        arguments: dict[str, Any] | None = None if offset is None else {"x-stream-offset": offset}  # Any: an AMQP table
        await self._answered(self._under.basic_consume(queue, callback, no_ack=no_ack, arguments=arguments))

    async def qos(self, prefetch: int) -> None:
        """Bound what is received and not acknowledged."""
        await self._answered(self._under.basic_qos(prefetch_count=prefetch))

    async def declare(
        self,
        queue: str,
        *,
        passive: bool = False,
        durable: bool = False,
        exclusive: bool = False,
        auto_delete: bool = False,
        arguments: dict[str, Any] | None = None,  # Any: an AMQP table
    ) -> tuple[str, int]:
        """Make a queue, or see that it is there; its name and how many messages wait in it."""
        ok = await self._answered(
            self._under.queue_declare(
                queue,
                passive=passive,
                durable=durable,
                exclusive=exclusive,
                auto_delete=auto_delete,
                arguments=arguments,
            )
        )
        return str(ok.queue), ok.message_count or 0

    async def delete(self, queue: str) -> None:
        """Delete a queue; an unknown one is fine."""
        await self._answered(self._under.queue_delete(queue))

    async def bind(self, queue: str, exchange: str, routing_key: str) -> None:
        """Bind a queue to an exchange."""
        await self._answered(self._under.queue_bind(queue, exchange, routing_key=routing_key))

    async def declare_exchange(self, exchange: str) -> None:
        """Make a durable topic exchange."""
        await self._answered(self._under.exchange_declare(exchange, exchange_type="topic", durable=True))

    async def _answered(self, call: Awaitable[T]) -> T:
        """The result of a call that RabbitMQ answers, or at least reads.

        Raises:
            ConnectionResetError: the channel is gone, or there is no answer.
        """
        until_s = asyncio.get_running_loop().time() + self._silent_s
        return await self._call(call, lambda: until_s - asyncio.get_running_loop().time())

    async def _call(self, call: Awaitable[T], left_s: Callable[[], float]) -> T:
        try:
            return await guarded(call, left_s, self.closing)
        except SilentError:
            self._give_up()
            raise
