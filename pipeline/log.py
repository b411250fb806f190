"""A run's log in messages instead of bytes: publish once, find by key, read in order."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final, TypeVar, cast

import msgspec
import structlog

from broker.api import Broker, PayloadStore, Published, Record
from broker.errors import PayloadMissingError
from pipeline.errors import PayloadGoneError
from schemas.errors import DecodeError
from schemas.payload import INLINE, INLINE_LIMIT_BYTES, PayloadRef, check_payload, inline_ref
from schemas.subjects import Topic
from schemas.topics import TOPICS

M = TypeVar("M", bound=msgspec.Struct)
Publish = Callable[[str, bytes], Awaitable[Published]]
log = structlog.get_logger("headrace.log")

_TOPIC_OF: Final[Mapping[type[msgspec.Struct], Topic[Any]]] = {topic.message: topic for topic in TOPICS}


def topic_of(kind: type[M]) -> Topic[M]:
    """The one topic that carries messages of this type."""
    return cast("Topic[M]", _TOPIC_OF[kind])  # cast: the table holds each message type's own topic


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """A decoded message with its place in the log."""

    sequence: int
    topic: Topic[Any]
    message: msgspec.Struct
    unix_time_s: float


class RunLog:
    """What stages may do with the log besides returning messages."""

    def __init__(self, broker: Broker, *, publish: Publish | None = None) -> None:
        """Args:
        broker: the run's.
        publish: another way to publish (one that waits for room).
        """
        self.broker: Final = broker
        self.run: Final = broker.run
        self._publish: Final[Publish] = publish or broker.publish

    async def publish(self, message: M) -> M:
        """Store a message under its key. The message that stands there afterwards: the caller's, or that of whoever came
        first.
        """
        kind: type[M] = type(message)
        topic: Topic[M] = topic_of(kind)
        published = await self._publish(topic.subject(self.run, message), topic.encode(message))
        return message if published.standing is None else topic.decode(published.standing)

    async def find(self, topic: Topic[M], *key: str | int) -> M | None:
        """The message that stands under a key."""
        record = await self.broker.get(topic.subject_of(self.run, *key))
        return None if record is None else topic.decode(record.data)

    @asynccontextmanager
    async def read(
        self, topics: Sequence[Topic[Any]], *, after_sequence: int = 0, follow: bool = True
    ) -> AsyncGenerator[AsyncIterator[Entry]]:
        """Messages of these topics in order. What can't be decoded is passed over with a warning: the stage that consumes it
        makes it a dead letter.
        """
        by_prefix = {topic.name: topic for topic in topics}

        async def entries(records: AsyncIterator[Record]) -> AsyncIterator[Entry]:
            async for record in records:
                tokens = record.subject.split(".", 4)
                topic = by_prefix[f"{tokens[2]}.{tokens[3]}"]
                try:
                    message = topic.decode_at(self.run, record.subject, record.data)
                except DecodeError as error:
                    log.warning("a message is passed over", subject=record.subject, error=str(error))
                    continue
                yield Entry(sequence=record.sequence, topic=topic, message=message, unix_time_s=record.unix_time_s)

        filters = [topic.filter(self.run) for topic in topics]
        async with self.broker.read(filters, after_sequence=after_sequence, follow=follow) as records:
            yield entries(records)


class RunPayloads:
    """Payloads of a run: small ones may ride inside the message that names them."""

    def __init__(self, broker: Broker, *, store: PayloadStore | None = None) -> None:
        """Args:
        broker: the run's.
        store: another way to its payloads.
        """
        self._store: Final = store or broker.payloads

    async def put(self, data: bytes | memoryview) -> PayloadRef:
        """Store; returns when stored."""
        return await self._store.put(data)

    async def hold(self, data: bytes | memoryview) -> PayloadRef:
        """A reference that carries small bytes itself, and names stored ones otherwise."""
        return inline_ref(data) if len(data) < INLINE_LIMIT_BYTES else await self.put(data)

    async def get(self, ref: PayloadRef) -> memoryview:
        """The bytes of a reference, checked.

        Raises:
            PayloadGoneError: the store does not hold it.
            DigestError: the bytes are not what was stored.
        """
        if ref.store == INLINE and ref.inline is not None:
            check_payload(ref, ref.inline)
            return ref.inline
        try:
            return await self._store.get(ref)
        except PayloadMissingError as error:
            raise PayloadGoneError(str(error)) from error

    async def delete(self, ref: PayloadRef) -> None:
        """Forget a stored payload that no message needs any more."""
        if ref.store != INLINE:
            await self._store.delete(ref.id)
