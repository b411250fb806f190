"""A channel that stays open and confirms nothing more is given up."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import anyio
import pytest
from aiormq.abc import DeliveredMessage
from pamqp.commands import Basic
from waiting import wait_until

from broker.rabbitmq.channel import Channel
from broker.rabbitmq.follower import Follower
from broker.rabbitmq.incoming import Incoming
from broker.rabbitmq.index import LogIndex


class Under:
    """Confirms what it is told to."""

    def __init__(self) -> None:
        self.closing = asyncio.get_running_loop().create_future()
        self.on_consumer_cancel_callbacks = set()
        self.confirms: dict[bytes, asyncio.Event] = {}
        self.cancelled: list[bytes] = []

    async def basic_publish(self, body: bytes, **_others) -> None:
        try:
            await self.confirms.setdefault(body, asyncio.Event()).wait()
        except asyncio.CancelledError:
            self.cancelled.append(body)
            raise

    async def basic_ack(self, *_arguments, **_others) -> None:
        await asyncio.Event().wait()

    async def basic_consume(self, *_arguments, **_others) -> None:
        await asyncio.Event().wait()


async def test_a_channel_that_confirms_nothing_more_is_given_up_with_all_that_waits():
    under = Under()
    channel = Channel(under, silent_s=0.05)
    ended: list[bytes] = []

    async def publish(body: bytes) -> None:
        with pytest.raises(ConnectionResetError, match="confirms nothing"):
            await channel.publish(body, Basic.Properties(), routing_key="q")
        ended.append(body)

    with anyio.fail_after(10):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(publish, b"a")
            tasks.start_soon(publish, b"b")
            await channel.until_closed()
    assert sorted(ended) == sorted(under.cancelled) == [b"a", b"b"]


async def test_a_channel_that_goes_on_confirming_others_is_waited_for():
    under = Under()
    channel = Channel(under, silent_s=0.5)
    with anyio.fail_after(30):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lambda: channel.publish(b"slow", Basic.Properties(), routing_key="q"))
            began_s = asyncio.get_running_loop().time()
            number = 0
            while asyncio.get_running_loop().time() < began_s + 1.2:  # beyond a silent channel's time
                number += 1
                body = b"%d" % number
                under.confirms[body] = asyncio.Event()
                under.confirms[body].set()
                await channel.publish(body, Basic.Properties(), routing_key="q")
            under.confirms[b"slow"].set()
    assert under.cancelled == []


async def test_a_channel_that_leaves_a_call_unanswered_is_given_up():
    channel = Channel(Under(), silent_s=0.02)
    with anyio.fail_after(10):
        with pytest.raises(ConnectionResetError, match="answers nothing"):
            await Incoming(channel).open_stream("HR_r", 0)
        await channel.until_closed()


async def test_an_acknowledgement_that_waits_for_room_in_a_connection_that_is_gone_ends_with_it():
    under = Under()
    channel = Channel(under)
    under.closing.set_result(None)
    with anyio.fail_after(5), pytest.raises(ConnectionResetError):
        await channel.ack(DeliveredMessage(Basic.Deliver(delivery_tag=1), None, b"", None), wait=False)


class SilentStream:
    """A link whose channels give nothing of a stream and stay open."""

    def __init__(self) -> None:
        self.offsets: list[int] = []

    @asynccontextmanager
    async def channel(self, *, prefetch: int):
        yield self

    @property
    def closing(self):
        return asyncio.get_running_loop().create_future()

    async def consume(self, _stream, _callback, *, offset: int) -> None:
        self.offsets.append(offset)


async def test_a_stream_that_is_silent_is_read_anew_from_where_the_fold_stands():
    link = SilentStream()
    index = LogIndex()
    index.pass_over(index.next_offset)
    follower = Follower(link, "HR_r", index, quiet_s=0.02)
    with anyio.fail_after(10):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(follower.run)
            await wait_until(lambda: len(link.offsets) >= 3, "it was read anew twice")
            tasks.cancel_scope.cancel()
    assert set(link.offsets) == {index.next_offset}
