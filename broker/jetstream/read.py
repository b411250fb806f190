"""All messages of some filters in order, without a gap, whatever happens to the connection or the server.

An ephemeral consumer numbers what it sends; a number that is missing, a renewed connection or a lost heartbeat makes a
new consumer from the first message that was not seen. It must not know who reads.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager

import anyio
import numpy as np
import numpy.typing as npt

from broker.api import Record, RecordBatch
from broker.batches import batch_of
from broker.errors import NoSuchStreamError
from broker.iterating import Iterating
from broker.jetstream.api import ApiError, Code, call
from broker.jetstream.consume import ack_numbers
from broker.jetstream.headers import no_own_headers, read_headers
from broker.jetstream.link import Link
from broker.jetstream.pull import Pull, Raw
from broker.shapes import ConsumerInfo, StreamInfo
from broker.topology import NANOSECONDS

PREFETCH = 2048
MAX_BYTES = 16 * 1024 * 1024
INACTIVE_S = 60.0
"""The server forgets a reader's consumer after so long without it."""
BACK_OFF_S = 0.25


class Reader:
    """The position of one reader."""

    def __init__(self, link: Link, stream: str, filters: tuple[str, ...], after: int, *, headers_only: bool) -> None:
        self._link = link
        self._stream = stream
        self._filters = filters
        self._headers_only = headers_only
        self._last = after
        self._end: int | None = None
        self._pending = 0
        self._name = ""
        self._expected = 1
        self._made_s = 0.0
        self.num_gaps = 0
        self._pull = Pull(link, prefetch=PREFETCH, max_bytes=MAX_BYTES, recover=self._make_consumer)

    async def open(self, *, follow: bool) -> None:
        """Start; without `follow`, fix where to end."""
        if not follow:
            try:
                info = await call(self._link, f"STREAM.INFO.{self._stream}", None, StreamInfo)
            except ApiError as error:
                raise self._no_stream(error) from error
            self._end = info.state.last_seq
        await self._pull.open()

    async def close(self) -> None:
        """Stop, and free what the server holds."""
        await self._pull.close()
        self._drop_consumer()

    async def next(self) -> Record:
        """The next record."""
        while True:
            self._stop_at_end()
            if self._end is None or self._pull.ready:
                raw = await self._pull.next()
            else:
                raw = await self._next_or_look()
                if raw is None:
                    continue
            _, sequence, number, time_ns, pending = ack_numbers(raw.reply)
            if f".{self._name}.".encode() not in raw.reply or sequence <= self._last:
                continue  # of a consumer that was given up
            if number != self._expected:
                self.num_gaps += 1
                self._pull.clear()
                self._pull.trouble(f"message {self._expected} of the reader is missing, {number} came")
                continue
            if self._end is not None and sequence > self._end:
                raise StopAsyncIteration
            self._expected += 1
            self._last = sequence
            self._pending = pending
            return Record(
                subject=raw.subject.decode("utf-8", "replace"),
                sequence=sequence,
                data=raw.data,
                unix_time_s=time_ns / NANOSECONDS,
                headers=read_headers(raw.headers),
            )

    async def next_batch(self) -> RecordBatch:
        """The next records, as many as have arrived."""
        self._stop_at_end()
        batch = self._arrived() if self._pull.ready else None
        return batch_of([await self.next()]) if batch is None else batch

    def _arrived(self) -> RecordBatch | None:
        """What has arrived, if all of it is what should come next: a message costs little here. None: look at each."""
        subjects, replies, datas, blocks = self._pull.queued()
        numbers = _numbers(replies, self._name)
        if numbers is None:
            return None
        if self._end is not None:
            numbers = numbers[: int(np.searchsorted(numbers[:, 1], self._end, side="right"))]
        count = len(numbers)
        expected = np.arange(self._expected, self._expected + count)
        if not count or numbers[0, 1] <= self._last or not np.array_equal(numbers[:, 2], expected):
            return None
        self._pull.take(count)
        self._expected += count
        self._last = int(numbers[-1, 1])
        self._pending = int(numbers[-1, 4])
        headers = {} if no_own_headers(blocks) else dict(enumerate(map(read_headers, blocks[:count])))
        return RecordBatch(
            subjects=b"\n".join(subjects[:count]).decode("utf-8", "replace").split("\n"),
            sequences=numbers[:, 1].copy(),
            unix_times_s=np.array([time_ns / NANOSECONDS for time_ns in numbers[:, 3].tolist()]),
            datas=list(datas[:count]),
            headers={number: found for number, found in headers.items() if found},
        )

    def _stop_at_end(self) -> None:
        if self._end is not None and (self._last >= self._end or not self._pending):
            raise StopAsyncIteration

    async def _next_or_look(self) -> Raw | None:
        """For a reader with an end: what it waits for may have been purged, so look again now and then."""
        with anyio.move_on_after(2 * self._link.settings.idle_heartbeat_s):
            return await self._pull.next()
        self._pull.trouble("nothing came before the end")
        return None

    async def _make_consumer(self, reason: str) -> str:
        if reason and time.monotonic() - self._made_s < BACK_OFF_S:
            await anyio.sleep(BACK_OFF_S)
        self._made_s = time.monotonic()
        self._pull.clear()
        self._drop_consumer()
        name = f"r{secrets.token_hex(8)}"
        config: dict[str, object] = {
            "name": name,
            "deliver_policy": "by_start_sequence",
            "opt_start_seq": self._last + 1,
            "ack_policy": "none",
            "max_deliver": 1,
            "replay_policy": "instant",
            "inactive_threshold": round(INACTIVE_S * NANOSECONDS),
            "num_replicas": 1,
            "mem_storage": True,
            "headers_only": self._headers_only,
        }
        if len(self._filters) == 1:
            config["filter_subject"] = self._filters[0]
        else:
            config["filter_subjects"] = list(self._filters)
        body = {"stream_name": self._stream, "config": config, "action": "create"}
        try:
            info = await call(self._link, f"CONSUMER.CREATE.{self._stream}.{name}", body, ConsumerInfo)
        except ApiError as error:
            raise self._no_stream(error) from error
        self._name = name
        self._expected = 1
        self._pending = info.num_pending
        return f"{self._stream}.{name}"

    def _drop_consumer(self) -> None:
        if self._name:
            self._link.tell(f"$JS.API.CONSUMER.DELETE.{self._stream}.{self._name}", b"", reply=self._link.new_inbox())
            self._name = ""

    def _no_stream(self, error: ApiError) -> Exception:
        if error.err_code == Code.STREAM_NOT_FOUND:
            return NoSuchStreamError(
                f"expected the stream {self._stream} on this broker, found none"
                + (f"; {self._last} messages had been read from it" if self._last else "")
            )
        return error


def _numbers(replies: Sequence[bytes], consumer: str) -> npt.NDArray[np.int64] | None:
    """The numbers of ack subjects (as `ack_numbers`), one row each; None where one is of another form or consumer."""
    first = replies[0]
    start = first.find(b".%b." % consumer.encode())
    prefix = first[: start + len(consumer) + 2]
    text = b" ".join(replies)
    if start < 0 or text.count(prefix) != len(replies) or first.count(b".") != prefix.count(b".") + 4:
        return None
    numbers = np.fromstring(text.replace(prefix, b"").replace(b".", b" "), dtype=np.int64, sep=" ")
    return numbers.reshape(-1, 5) if numbers.size == 5 * len(replies) else None


@asynccontextmanager
async def read_batches(
    link: Link, stream: str, filters: tuple[str, ...], after: int, *, follow: bool
) -> AsyncGenerator[AsyncIterator[RecordBatch]]:
    """Read the log in order, many messages at once."""
    async with _opened(link, stream, filters, after, follow=follow, headers_only=False) as reader:
        yield Iterating(reader.next_batch)


@asynccontextmanager
async def read(
    link: Link, stream: str, filters: tuple[str, ...], after: int, *, follow: bool, headers_only: bool
) -> AsyncGenerator[AsyncIterator[Record]]:
    """Read the log in order."""
    async with _opened(link, stream, filters, after, follow=follow, headers_only=headers_only) as reader:
        yield Iterating(reader.next)


@asynccontextmanager
async def _opened(
    link: Link, stream: str, filters: tuple[str, ...], after: int, *, follow: bool, headers_only: bool
) -> AsyncGenerator[Reader]:
    reader = Reader(link, stream, filters, after, headers_only=headers_only)
    try:
        await reader.open(follow=follow)
        yield reader
    finally:
        with anyio.CancelScope(shield=True), anyio.move_on_after(2):
            await reader.close()
