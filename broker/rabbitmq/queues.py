"""The queues of a run's durables: their names, how they are declared, what a message in them looks like.

A durable's queue is a quorum queue. What is handed out more often than its delivery limit goes to the run's dead-letter queue and from
there, with its count, back into its own (broker.rabbitmq.dispatcher): giving up is the pipeline's decision, not RabbitMQ's.
"""

from __future__ import annotations

from typing import Any, Final

import aiormq
import aiormq.exceptions
import anyio
import msgspec
from aiormq.abc import DeliveredMessage
from pamqp.commands import Basic

from broker.api import Record
from broker.errors import NoSuchStreamError
from broker.rabbitmq.channel import Channel
from broker.rabbitmq.link import Link
from broker.rabbitmq.wire import PERSISTENT

DELIVERY_LIMIT: Final = 20
"""Hand-outs by one queue before a message comes back with its count: keeps a message that kills its workers from circling unseen."""


SETTLE_S: Final = 3.0
"""After which a new queue outlives a kill; about one second was seen."""


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """A message of a durable's queue."""

    durable: str
    subject: str
    sequence: int
    data: bytes
    num_before: int
    """Hand-outs before it came into the queue this time."""

    @classmethod
    def of(cls, durable: str, record: Record, num_before: int = 0) -> Task:
        """A message of the log for a durable."""
        return cls(
            durable=durable,
            subject=record.subject,
            sequence=record.sequence,
            data=record.data,
            num_before=num_before,
        )


def work_queue(run: str, durable: str) -> str:
    """The queue of a durable."""
    return f"HRW_{run}.{durable}"


def dead_queue(run: str) -> str:
    """Where messages go that were handed out too often."""
    return f"HRD_{run}"


def stream_queue(run: str) -> str:
    """The log."""
    return f"HR_{run}"


async def create_stream(link: Link, run: str) -> None:
    """Make the log's stream, without any limit of its own: RabbitMQ would drop its oldest messages silently.

    Returns when the declaration is safe: RabbitMQ has a new queue on disk only a moment later, and killed before
    that it forgets the queue with all that was confirmed in it.
    """
    async with link.channel() as channel:
        await channel.declare(stream_queue(run), durable=True, arguments={"x-queue-type": "stream"})
    await anyio.sleep(SETTLE_S)


async def is_there(link: Link, queue: str) -> bool:
    """Whether a queue stands."""
    try:
        async with link.channel() as channel:
            await channel.declare(queue, passive=True)
    except aiormq.exceptions.ChannelNotFoundEntity:
        return False
    return True


async def find_stream(channel: Channel, run: str) -> None:
    """See that the stream is there.

    Raises:
        NoSuchStreamError: it is not.
    """
    try:
        await channel.declare(stream_queue(run), passive=True)
    except aiormq.exceptions.ChannelNotFoundEntity as error:
        raise NoSuchStreamError(f"expected the stream {stream_queue(run)} on this broker, found none") from error


async def declare_dead(channel: Channel, run: str) -> None:
    """Make the dead-letter queue."""
    await channel.declare(dead_queue(run), durable=True, arguments={"x-queue-type": "quorum"})


async def declare_work(channel: Channel, run: str, durable: str) -> int:
    """Make a durable's queue; how many messages wait in it."""
    arguments: dict[str, Any] = {  # Any: an AMQP table holds what it holds
        "x-queue-type": "quorum",
        "x-delivery-limit": DELIVERY_LIMIT,
        "x-overflow": "reject-publish",
        "x-dead-letter-strategy": "at-least-once",
        "x-dead-letter-exchange": "",
        "x-dead-letter-routing-key": dead_queue(run),
    }
    _, waiting = await channel.declare(work_queue(run, durable), durable=True, arguments=arguments)
    return waiting


async def publish_task(channel: Channel, run: str, task: Task) -> None:
    """Put a task into its queue; returns when it is stored there.

    Raises:
        aiormq.exceptions.AMQPError, ConnectionError: it may not be.
    """
    table: dict[str, Any] = {
        "d": task.durable,
        "s": task.subject,
        "q": task.sequence,
        "n": task.num_before,
    }  # Any: same
    await channel.publish(
        task.data,
        Basic.Properties(delivery_mode=PERSISTENT, headers=table),
        routing_key=work_queue(run, task.durable),
        mandatory=True,
    )


def read_task(message: DeliveredMessage) -> tuple[Task, int] | None:
    """A task, and how often its queue handed it out before; None for what somebody else put there."""
    table: dict[str, Any] = message.header.properties.headers or {}  # Any: same
    match table:
        case {"d": str(durable), "s": str(subject), "q": int(sequence), "n": int(num_before)}:
            task = Task(
                durable=durable, subject=subject, sequence=sequence, data=bytes(message.body), num_before=num_before
            )
            return task, int(table.get("x-delivery-count", 0) or 0)
        case _:
            return None
