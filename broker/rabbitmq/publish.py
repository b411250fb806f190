"""Creating messages once on a stream that refuses nothing: write, see it come back, and learn who was first."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Mapping
from typing import Final

import aiormq
import aiormq.exceptions
import anyio
import structlog

from broker.api import Published, Record
from broker.errors import NoSuchStreamError, NotConnectedError, PublishTimeoutError, StoreFullError
from broker.rabbitmq.channel import Channel
from broker.rabbitmq.follower import Follower
from broker.rabbitmq.incoming import QUIET_S
from broker.rabbitmq.index import Kind
from broker.rabbitmq.link import LOST, Link
from broker.rabbitmq.wire import Written, check_headers, check_size, digest_of, properties, read_written

log = structlog.get_logger("broker")

_PATIENCE_S: Final = 2.0
"""A write that was confirmed and has not come back for so long is written again: the first one counts."""


class Publisher:
    """Writes to one run's stream, many messages at a time, on one channel."""

    def __init__(self, link: Link, stream: str, follower: Follower, max_bytes: int) -> None:
        self._link: Final = link
        self._stream: Final = stream
        self._follower: Final = follower
        self._max_bytes: Final = max_bytes
        self._deadline_s: Final = link.settings.publish_deadline_s
        self._slots = asyncio.Semaphore(min(link.settings.max_in_flight, 1024))
        self._waiting: dict[str, list[asyncio.Future[Written]]] = {}
        self._marks: dict[str, asyncio.Future[Written]] = {}
        self._channel: Channel | None = None
        self._ready = asyncio.Event()
        follower.on_written(self._see)

    async def run(self) -> None:
        """Keep a channel with confirms, for ever."""
        while True:
            try:
                async with self._link.channel(confirms=True) as channel:
                    self._channel = channel
                    self._ready.set()
                    await channel.until_closed()
            except LOST as error:
                log.debug("the publisher lost its channel", reason=str(error))
            self._ready.clear()
            self._channel = None
            await anyio.sleep(0.05)

    async def create(self, subject: str, data: bytes, headers: Mapping[str, str] | None) -> Published:
        """Create the message of a subject, once. See `Broker.publish`."""
        headers = headers or {}
        check_headers(headers)
        check_size(subject, data, headers)
        message_id = secrets.token_hex(8)
        until_s = time.monotonic() + self._deadline_s
        async with self._slots:
            while (standing := self._follower.index.find(subject)) is None:
                self._check_room(subject, len(data))
                first = await self._write_and_see(subject, data, headers, message_id, until_s)
                if first is not None and first.message_id == message_id:
                    found = self._follower.index.find(subject)
                    return Published(sequence=found.sequence if found else 0, created=True)
        if standing.digest == digest_of(data):
            return Published(sequence=standing.sequence, created=False)
        record = await self.get(subject)
        return Published(sequence=standing.sequence, created=False, standing=record.data if record else None)

    async def mark(self) -> None:
        """Return when everything that was written before this call is folded."""
        message_id = secrets.token_hex(8)
        until_s = time.monotonic() + self._deadline_s
        seen: asyncio.Future[Written] = asyncio.get_running_loop().create_future()
        self._marks[message_id] = seen
        try:
            while not seen.done():
                await self._write(Kind.MARK, "", b"", {}, message_id, until_s)
                await asyncio.wait((seen,), timeout=_PATIENCE_S)
        finally:
            del self._marks[message_id]

    async def control(self, kind: Kind, subject: str, data: bytes) -> None:
        """Write something that is no message, and return when it is folded."""
        await self._write(kind, subject, data, {}, secrets.token_hex(8), time.monotonic() + self._deadline_s)
        await self.mark()

    async def get(self, subject: str) -> Record | None:
        """The message that stands on a subject.

        Raises:
            NotConnectedError: the stream did not give it in time.
        """
        index = self._follower.index
        standing = index.find(subject)
        if standing is None:
            return None
        found = self._follower.tail.get(standing.sequence)
        if found is not None:
            return found
        offset = index.offset_of(standing.sequence)
        with anyio.move_on_after(self._deadline_s):
            return (await self._fetch(offset)).record(standing.sequence)
        raise NotConnectedError(
            f"{subject!r}: expected it at offset {offset} of {self._stream} within {self._deadline_s} s, "
            f"found no answer ({self._link.state.last_error or 'the stream is silent'})"
        )

    async def _fetch(self, offset: int) -> Written:
        while True:
            arrived: asyncio.Future[Written] = asyncio.get_running_loop().create_future()

            async def arrive(message: aiormq.abc.DeliveredMessage, arrived: asyncio.Future[Written] = arrived) -> None:
                written = read_written(message)
                if written is not None and written.offset == offset and not arrived.done():
                    arrived.set_result(written)

            try:
                async with self._link.channel(prefetch=1) as channel:
                    await channel.consume(self._stream, arrive, offset=offset)
                    done = (arrived, channel.closing)
                    await asyncio.wait(done, timeout=QUIET_S, return_when=asyncio.FIRST_COMPLETED)
                    if arrived.done():
                        return arrived.result()
            except LOST as error:
                log.debug("a look into the log lost its channel", reason=str(error))
            await anyio.sleep(0.05)

    def _check_room(self, subject: str, size: int) -> None:
        held = self._follower.index.size_bytes
        if 0 <= self._max_bytes < held + size:
            raise StoreFullError(
                f"the log holds {held} of {self._max_bytes} bytes and refuses {subject!r} ({size} bytes): "
                "purge it or raise its limit"
            )

    async def _write_and_see(
        self, subject: str, data: bytes, headers: Mapping[str, str], message_id: str, until_s: float
    ) -> Written | None:
        """Write, and give the message that stands then; None if it did not come back in time: write again."""
        seen: asyncio.Future[Written] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(subject, []).append(seen)
        try:
            await self._write(Kind.MESSAGE, subject, data, headers, message_id, until_s)
            done, _ = await asyncio.wait((seen,), timeout=_PATIENCE_S)
            return seen.result() if done else None
        finally:
            waiting = self._waiting[subject]
            waiting.remove(seen)
            if not waiting:
                del self._waiting[subject]

    async def _write(
        self, kind: Kind, subject: str, data: bytes, headers: Mapping[str, str], message_id: str, until_s: float
    ) -> None:
        """Write and have it confirmed; after a loss again.

        Raises:
            PublishTimeoutError: not confirmed before `until_s`.
            NoSuchStreamError: the run has no stream any more.
        """
        unroutable = False
        try:
            async with asyncio.timeout_at(asyncio.get_running_loop().time() + max(until_s - time.monotonic(), 0.0)):
                while True:
                    await self._ready.wait()
                    channel = self._channel
                    if channel is None:
                        continue
                    try:
                        await channel.publish(
                            data,
                            properties(kind, subject, message_id, headers),
                            routing_key=self._stream,
                            mandatory=True,
                        )
                    except aiormq.exceptions.PublishError:
                        unroutable = True  # as it is for a moment after a restart
                        await anyio.sleep(0.1)
                    except LOST as error:
                        unroutable = False
                        log.debug("a publish was not confirmed; it is written again", reason=str(error))
                        await anyio.sleep(0.05)
                    else:
                        return
        except TimeoutError as error:
            if unroutable:
                raise NoSuchStreamError(f"expected the stream {self._stream} on this broker, found none") from error
            raise PublishTimeoutError(
                f"{subject or kind.name!r}: no confirmation within {self._deadline_s} s ({self._link.state.last_error})"
            ) from error

    def _see(self, written: Written, sequence: int) -> None:
        if written.kind is Kind.MARK:
            mark = self._marks.get(written.message_id)
            if mark is not None and not mark.done():
                mark.set_result(written)
        elif written.kind is Kind.MESSAGE and sequence:
            for seen in self._waiting.get(written.subject, ()):
                if not seen.done():
                    seen.set_result(written)
