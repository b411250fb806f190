"""Messages of one consumer, taken one after the other by whoever wants them: an error in dealing with one is an error there.

(aiormq calls back for each message and logs what the callback raises.)

RabbitMQ gives nothing more to a reader of a stream that began in the moment when the stream's writer was replaced, as after a
crash, and tells it nothing (3.10.8). So a reader to whom nothing comes begins anew.
"""

from __future__ import annotations

import asyncio
from typing import Final

import anyio
from aiormq.abc import DeliveredMessage

from broker.rabbitmq.channel import Channel

QUIET_S: Final = 5.0
"""A stream's reader to whom nothing comes for so long begins anew: a few small calls."""
_ACK_EVERY: Final = 128


class Incoming:
    """What a channel's consumer received and nobody took yet; bounded by the channel's prefetch."""

    def __init__(self, channel: Channel) -> None:
        self.channel: Final = channel
        self._arrived: asyncio.Queue[DeliveredMessage] = asyncio.Queue()
        self._taken = 0

    async def open_stream(self, stream: str, offset: int) -> None:
        """Begin to read a stream at an offset."""
        await self.channel.consume(stream, self._arrived.put, offset=offset)

    async def open_queue(self, queue: str) -> None:
        """Begin to take from a queue."""
        await self.channel.consume(queue, self._arrived.put)

    async def next(self) -> DeliveredMessage:
        """The next message. May be cancelled without loss.

        Raises:
            ConnectionError: the channel is gone.
        """
        while self._arrived.empty():
            arriving = asyncio.ensure_future(self._arrived.get())
            try:
                await asyncio.wait((arriving, self.channel.closing), return_when=asyncio.FIRST_COMPLETED)
            except asyncio.CancelledError:
                if arriving.done():
                    self._put_back(arriving.result())
                raise
            finally:
                arriving.cancel()
            if arriving.done() and not arriving.cancelled():
                return arriving.result()
            raise ConnectionResetError("the channel closed")
        return self._arrived.get_nowait()

    def _put_back(self, message: DeliveredMessage) -> None:
        rest = [message]
        while not self._arrived.empty():
            rest.append(self._arrived.get_nowait())
        for one in rest:
            self._arrived.put_nowait(one)

    async def next_of_stream(self, quiet_s: float = QUIET_S) -> DeliveredMessage:
        """As `next`, acknowledging now and then: a stream goes on as far as that.

        Raises:
            LOST: the channel is gone, or nothing came for `quiet_s`.
        """
        try:
            with anyio.fail_after(quiet_s):
                message = await self.next()
        except TimeoutError as error:
            raise ConnectionResetError("the stream is silent") from error
        self._taken += 1
        if self._taken % _ACK_EVERY == 0:
            await self.channel.ack(message, multiple=True, wait=False)
        return message
