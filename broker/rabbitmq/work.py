"""A worker's share of a durable: deliveries from its quorum queue, and what RabbitMQ does not do by itself.

* `ack_wait`: this process gives back what its own handlers neither acknowledge nor give a sign of life for; what a dead or
  silent process held comes back when its connection is given up (two heartbeats). What waits here for a free handler is kept.
* `retry` after a delay, and work that takes longer than RabbitMQ waits: parked (broker.rabbitmq.parked).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Final

import anyio
import structlog
from aiormq.abc import DeliveredMessage

from broker.api import ConsumerSettings, Delivery
from broker.iterating import Iterating
from broker.rabbitmq.beside import running_beside
from broker.rabbitmq.channel import Channel
from broker.rabbitmq.incoming import Incoming
from broker.rabbitmq.link import LOST, Link
from broker.rabbitmq.parked import Parked, ParkedWork
from broker.rabbitmq.queues import Task, declare_dead, declare_work, publish_task, read_task, work_queue

log = structlog.get_logger("broker")

HOLD_S: Final = 300.0
"""Unacknowledged for longer, a task is parked and acknowledged, or, if nobody took it yet, put into its queue again: far below
RabbitMQ's consumer_timeout of 30 minutes.
"""
PARKED_GRACE_S: Final = 5.0
"""Added to the ack wait of parked work: the clocks of its worker and of the dispatcher may differ."""


class RabbitDelivery:
    """A `Delivery` of RabbitMQ."""

    __slots__ = (
        "_share",
        "channel",
        "due_s",
        "held_since_s",
        "is_done",
        "is_parked",
        "is_taken",
        "message",
        "num_delivered",
        "task",
    )

    def __init__(self, share: Share, channel: Channel, message: DeliveredMessage, task: Task, delivered: int) -> None:
        self._share = share
        self.channel = channel
        self.message = message
        self.task = task
        self.num_delivered = task.num_before + delivered + 1
        self.held_since_s = time.monotonic()
        self.due_s = self.held_since_s + share.hold_s
        self.is_taken = False
        self.is_parked = False
        self.is_done = False

    @property
    def subject(self) -> str:
        return self.task.subject

    @property
    def sequence(self) -> int:
        return self.task.sequence

    @property
    def data(self) -> bytes:
        return self.task.data

    async def ack(self) -> None:
        await self._share.done(self)

    async def retry(self, delay_s: float) -> None:
        await self._share.again(self, delay_s)

    async def still_working(self) -> None:
        await self._share.alive(self)


class Share:
    """What one worker holds of a durable."""

    def __init__(
        self, link: Link, run: str, durable: str, settings: ConsumerSettings, parked: ParkedWork, hold_s: float = HOLD_S
    ) -> None:
        self.settings: Final = settings
        self._link: Final = link
        self._run: Final = run
        self._durable: Final = durable
        self._parked: Final = parked
        self.hold_s: Final = hold_s
        self._arrived: asyncio.Queue[RabbitDelivery] = asyncio.Queue()
        self._held: dict[int, RabbitDelivery] = {}
        """By identity."""
        self._back: Channel | None = None

    async def run(self) -> None:
        """Receive for ever."""
        while True:
            try:
                async with (
                    self._link.channel(confirms=True) as back,
                    self._link.channel(prefetch=self.settings.prefetch) as channel,
                ):
                    await declare_dead(channel, self._run)
                    await declare_work(channel, self._run, self._durable)
                    self._back = back
                    await self._receive(channel, back)
            except* LOST as group:
                log.debug("a worker's share lost its channel", durable=self._durable, reason=str(group.exceptions[0]))
            self._back = None
            self._forget()
            await anyio.sleep(0.2)  # a queue killed at its birth ends the connection each time

    async def _receive(self, channel: Channel, back: Channel) -> None:
        incoming = Incoming(channel)
        await incoming.open_queue(work_queue(self._run, self._durable))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._watch)
            tasks.start_soon(self._end_with, back)
            try:
                while True:
                    await self._arrive(channel, await incoming.next())
            finally:
                tasks.cancel_scope.cancel()

    async def _end_with(self, back: Channel) -> None:
        await back.until_closed()
        raise ConnectionResetError("nothing can be put back any more")

    async def _arrive(self, channel: Channel, message: DeliveredMessage) -> None:
        found = read_task(message)
        if found is None:
            log.warning("a message that is no task lies in a work queue", durable=self._durable)
            await channel.ack(message)
            return
        delivery = RabbitDelivery(self, channel, message, *found)
        self._held[id(delivery)] = delivery
        self._arrived.put_nowait(delivery)

    def _forget(self) -> None:
        """The channel is gone: all that was held, also what nobody took yet, goes to others, except what is parked."""
        while not self._arrived.empty():
            self._arrived.get_nowait()
        self._held = {key: held for key, held in self._held.items() if held.is_parked}

    async def take(self) -> RabbitDelivery:
        """The next delivery."""
        while True:
            delivery = await self._arrived.get()
            if id(delivery) in self._held:
                delivery.is_taken = True
                delivery.held_since_s = time.monotonic()
                delivery.due_s = delivery.held_since_s + self.settings.ack_wait_s
                return delivery

    async def done(self, delivery: RabbitDelivery) -> None:
        """Acknowledge."""
        delivery.is_done = True
        held = self._held.pop(id(delivery), None)
        if delivery.is_parked:
            await self._parked.remove(self._parking(delivery))
            return
        if held is None:  # given back meanwhile, and acknowledged then: a second time would close the channel
            return
        with suppress(*LOST):  # a lost channel gives it to somebody else: effects are idempotent
            await delivery.channel.ack(delivery.message, wait=False)

    async def again(self, delivery: RabbitDelivery, delay_s: float) -> None:
        """Deliver again after a delay."""
        if id(delivery) not in self._held:
            return
        if delay_s > 0:
            await self._park(delivery, delay_s)
        else:
            await self._give_back(delivery)

    async def alive(self, delivery: RabbitDelivery) -> None:
        """Push the redelivery back."""
        now_s = time.monotonic()
        delivery.due_s = now_s + self.settings.ack_wait_s
        if delivery.is_parked or (now_s - delivery.held_since_s > self.hold_s and id(delivery) in self._held):
            await self._park(delivery, self.settings.ack_wait_s + PARKED_GRACE_S, keep=True)

    async def _park(self, delivery: RabbitDelivery, delay_s: float, *, keep: bool = False) -> None:
        parked = self._parking(delivery, delay_s)
        await self._parked.put(parked)
        if delivery.is_done or (not delivery.is_parked and id(delivery) not in self._held):
            await self._parked.remove(parked)  # acknowledged, given back or lost with its channel meanwhile
            return
        if not delivery.is_parked:
            delivery.is_parked = True
            with suppress(*LOST):  # not acknowledged, it is handed out twice: effects are idempotent
                await delivery.channel.ack(delivery.message)
        if not keep:
            self._held.pop(id(delivery), None)

    def _parking(self, delivery: RabbitDelivery, delay_s: float = 0.0) -> Parked:
        return Parked(
            durable=self._durable,
            sequence=delivery.sequence,
            num_delivered=delivery.num_delivered,
            due_unix_s=time.time() + delay_s,
        )

    async def _give_back(self, delivery: RabbitDelivery) -> None:
        """Put it into its queue again, with its count, then acknowledge. One that nobody took was not handed out."""
        self._held.pop(id(delivery), None)
        back = self._back
        if back is None:
            return  # its channel is gone: it comes back by itself
        task = delivery.task
        with suppress(*LOST):  # the lost channel gives it back
            await publish_task(
                back,
                self._run,
                Task(
                    durable=task.durable,
                    subject=task.subject,
                    sequence=task.sequence,
                    data=task.data,
                    num_before=delivery.num_delivered - (not delivery.is_taken),
                ),
            )
            await delivery.channel.ack(delivery.message)

    async def _watch(self) -> None:
        """Give back what its handler forgot, and what waits for one for too long."""
        period_s = min(self.settings.ack_wait_s / 4, 0.5)
        while True:
            await anyio.sleep(period_s)
            now_s = time.monotonic()
            for delivery in [one for one in self._held.values() if one.due_s <= now_s]:
                if delivery.is_parked:
                    self._held.pop(id(delivery), None)  # it is due in the folder, too
                else:
                    await self._give_back(delivery)


@asynccontextmanager
async def consume(share: Share) -> AsyncGenerator[AsyncIterator[Delivery]]:
    """A worker's deliveries, until the context ends; what it holds then goes to others."""

    async def take() -> Delivery:
        return await share.take()

    async with running_beside() as tasks:
        tasks.start_soon(share.run)
        yield Iterating(take)
