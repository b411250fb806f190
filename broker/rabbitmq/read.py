"""Reading a run's log in order: from memory at its end, from the stream where a reader is behind that."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Final

import anyio
import msgspec
import structlog

from broker.api import Record
from broker.iterating import Iterating
from broker.naming import any_matches
from broker.rabbitmq.follower import Follower
from broker.rabbitmq.incoming import Incoming
from broker.rabbitmq.link import LOST, Link
from broker.rabbitmq.wire import offset_of, read_written

log = structlog.get_logger("broker")

_PREFETCH: Final = 512


class Reader:
    """One reader's place in the log."""

    def __init__(self, link: Link, stream: str, follower: Follower, patterns: tuple[str, ...], after: int) -> None:
        self._link: Final = link
        self._stream: Final = stream
        self._follower: Final = follower
        self._patterns: Final = patterns
        self._position = after
        self._stack = AsyncExitStack()
        self._backlog: Incoming | None = None

    async def next(self, last: int | None) -> Record:
        """The next record, once there is one.

        Raises:
            StopAsyncIteration: none up to `last`.
        """
        while True:
            index = self._follower.index
            self._position = max(self._position, index.first_sequence - 1)
            end = index.last_sequence if last is None else last
            if self._position >= end:
                if last is not None:
                    raise StopAsyncIteration
                await self.close()
                await self._follower.changed()
                continue
            record = await self._at(self._position + 1)
            self._position += 1
            if record is not None:
                return record

    async def close(self) -> None:
        """Let go of what was read ahead."""
        self._backlog = None
        await self._stack.aclose()

    async def _at(self, sequence: int) -> Record | None:
        """A record; None if it was purged, or is none that is wanted."""
        while any_matches(self._patterns, self._follower.index.subject_of(sequence)):
            found = self._follower.tail.get(sequence)
            if found is not None:
                if self._backlog is not None:
                    await self.close()
                await anyio.lowlevel.checkpoint_if_cancelled()
                return found
            try:
                return await self._from_stream(sequence)
            except LOST as error:
                log.debug("a reader lost its channel", reason=str(error))
                await self.close()
                await anyio.sleep(0.05)
        return None

    async def _from_stream(self, sequence: int) -> Record | None:
        wanted = self._follower.index.offset_of(sequence)
        if self._backlog is None:
            channel = await self._stack.enter_async_context(self._link.channel(prefetch=_PREFETCH))
            backlog = Incoming(channel)
            await backlog.open_stream(self._stream, wanted)
            self._backlog = backlog
        while True:
            message = await self._backlog.next_of_stream()
            offset = offset_of(message)
            if offset > wanted:
                await self.close()  # a cancelled look took it: begin again at the right place
                raise ConnectionResetError("read past a message")
            written = read_written(message)
            if offset == wanted and written is not None:
                return written.record(sequence)


@asynccontextmanager
async def read(
    link: Link,
    stream: str,
    follower: Follower,
    patterns: tuple[str, ...],
    after_sequence: int,
    *,
    last: int | None,
    headers_only: bool,
) -> AsyncGenerator[AsyncIterator[Record]]:
    """See `Broker.read`; `last` ends it."""
    reader = Reader(link, stream, follower, patterns, after_sequence)

    async def take() -> Record:
        record = await reader.next(last)
        return _without_data(record) if headers_only else record

    try:
        yield Iterating(take)
    finally:
        with anyio.CancelScope(shield=True):
            await reader.close()


def _without_data(record: Record) -> Record:
    headers = {**record.headers, "Nats-Msg-Size": str(len(record.data))}
    return msgspec.structs.replace(record, data=b"", headers=headers)
