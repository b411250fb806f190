"""A copy of some of a log's messages on a RabbitMQ, for teams that only consume there: a topic exchange, one message each.

The exchange keeps nothing: whoever wants messages binds a queue of his own to it before.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any, Final

import anyio
import structlog
from pamqp.commands import Basic

from broker.api import Record
from broker.rabbitmq.channel import Channel
from broker.rabbitmq.link import LOST, Link, open_link, without_secret
from broker.rabbitmq.wire import PERSISTENT
from broker.settings import ConnectSettings

log = structlog.get_logger("broker")

EXCHANGE: Final = "headrace"
MAX_KEY_BYTES: Final = 255
"""AMQP's limit of a routing key. A longer subject's key is its first tokens and a digest; the header `subject` has it whole."""


class RabbitMirror:
    """Publishes records, each once confirmed. Made by `open_mirror`."""

    def __init__(self, link: Link, exchange: str, urls: list[str]) -> None:
        self._link: Final = link
        self._exchange: Final = exchange
        self.place: Final = " ".join([*sorted(without_secret(url) for url in urls), exchange])
        """Where the copies go."""

    async def publish_all(self, records: list[Record]) -> None:
        """Publish in order; returns when all are confirmed. After a lost connection all of them again: at least once each."""
        while True:
            try:
                async with self._link.channel(confirms=True) as channel:
                    await channel.declare_exchange(self._exchange)
                    for record in records:
                        await self._publish(channel, record)
                    return
            except LOST as error:
                log.warning("a mirrored message is published again", reason=str(error))
                await anyio.sleep(0.2)

    async def _publish(self, channel: Channel, record: Record) -> None:
        table: dict[str, Any] = {"subject": record.subject, "sequence": record.sequence}  # Any: an AMQP table
        table.update(record.headers)
        labels = Basic.Properties(
            message_id=f"{record.subject.split('.')[1]}-{record.sequence}",
            content_type="application/msgpack",
            delivery_mode=PERSISTENT,
            headers=table,
        )
        await channel.publish(record.data, labels, exchange=self._exchange, routing_key=routing_key(record.subject))


def routing_key(subject: str) -> str:
    """A subject as a routing key."""
    if len(subject.encode()) <= MAX_KEY_BYTES:
        return subject
    digest = hashlib.blake2b(subject.encode(), digest_size=8).hexdigest()
    return ".".join([*subject.split(".")[:4], f"long-{digest}"])


@asynccontextmanager
async def open_mirror(
    urls: list[str], settings: ConnectSettings, exchange: str = EXCHANGE
) -> AsyncGenerator[RabbitMirror]:
    """A mirror's end on a RabbitMQ.

    Raises:
        NotConnectedError, NotAllowedError: no connection.
    """
    async with open_link(urls, settings) as link:
        yield RabbitMirror(link, exchange, urls)
