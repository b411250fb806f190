"""The `Broker` port over a `MemoryServer`."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager

import anyio
import anyio.lowlevel

from broker.api import (
    ALL_CAPABILITIES,
    Capability,
    ConsumerSettings,
    ConsumerStatus,
    Delivery,
    LogStatus,
    Published,
    Record,
    RecordBatch,
)
from broker.batches import batch_of
from broker.errors import ConflictError, NotConnectedError, RequestFailedError
from broker.iterating import Iterating
from broker.memory.durable import Durable, Outstanding
from broker.memory.payloads import MemoryPayloads
from broker.memory.server import MemoryRun, MemoryServer
from broker.naming import (
    any_matches,
    check_literal,
    check_log_filters,
    check_log_subject,
    check_talk_subject,
    run_names,
)
from schemas.subjects import check_filter, matches

LISTEN_BUFFER = 1024


class MemoryDelivery:
    """A `Delivery` of the in-memory broker."""

    __slots__ = ("_durable", "_item", "_server", "num_delivered")

    def __init__(self, server: MemoryServer, durable: Durable, item: Outstanding) -> None:
        self._server = server
        self._durable = durable
        self._item = item
        self.num_delivered = item.num_delivered

    @property
    def subject(self) -> str:
        return self._item.record.subject

    @property
    def sequence(self) -> int:
        return self._item.record.sequence

    @property
    def data(self) -> bytes:
        return self._item.record.data

    async def ack(self) -> None:
        self._durable.ack(self._item)
        self._server.wake()

    async def retry(self, delay_s: float) -> None:
        if self._item.num_delivered == self.num_delivered:
            self._durable.give_back(self._item, self._server.clock.now_s() + delay_s)
            self._server.wake()

    async def still_working(self) -> None:
        self._durable.postpone(self._item, self._server.clock.now_s() + self._durable.settings.ack_wait_s)


class MemoryBroker:
    """One connection to a `MemoryServer`."""

    def __init__(self, server: MemoryServer, run: str) -> None:
        self._names = run_names(run)
        self._server = server
        self._run: MemoryRun = server.run(run)

    @property
    def run(self) -> str:
        return self._names.run

    @property
    def capabilities(self) -> frozenset[Capability]:
        return ALL_CAPABILITIES

    @property
    def payloads(self) -> MemoryPayloads:
        return self._run.payloads

    async def publish(self, subject: str, data: bytes, *, headers: Mapping[str, str] | None = None) -> Published:
        check_log_subject(self._names, subject)
        self._server.check_size(subject, data, headers or {})
        await anyio.lowlevel.checkpoint()
        published = self._run.append(subject, data, headers or {})
        if published.created:
            self._server.wake()
        return published

    async def get(self, subject: str) -> Record | None:
        check_log_subject(self._names, subject)
        await anyio.lowlevel.checkpoint()
        return self._run.by_subject.get(subject)

    @asynccontextmanager
    async def read(
        self, filters: Sequence[str], *, after_sequence: int = 0, follow: bool = True, headers_only: bool = False
    ) -> AsyncGenerator[AsyncIterator[Record]]:
        patterns = tuple(filters)
        check_log_filters(self._names, patterns)
        last = None if follow else self._run.last
        position = after_sequence

        async def take() -> Record:
            nonlocal position
            while True:
                await anyio.lowlevel.checkpoint()
                position = max(position, self._run.first - 1)
                if position < (self._run.last if last is None else last):
                    position += 1
                    record = self._run.by_sequence.get(position)
                    if record is not None and any_matches(patterns, record.subject):
                        return _without_data(record) if headers_only else record
                elif last is not None:
                    raise StopAsyncIteration
                else:
                    await self._server.changed()

        yield Iterating(take)

    @asynccontextmanager
    async def read_batches(
        self, filters: Sequence[str], *, after_sequence: int = 0, follow: bool = True
    ) -> AsyncGenerator[AsyncIterator[RecordBatch]]:
        async with self.read(filters, after_sequence=after_sequence, follow=follow) as records:

            async def take() -> RecordBatch:
                return batch_of([await anext(records)])

            yield Iterating(take)

    @asynccontextmanager
    async def consume(
        self, durable: str, filters: Sequence[str], settings: ConsumerSettings
    ) -> AsyncGenerator[AsyncIterator[Delivery]]:
        patterns = tuple(filters)
        check_log_filters(self._names, patterns)
        found = self._run.durable(durable, patterns, settings)
        worker = self._server.new_id()
        found.waiting += 1

        async def take() -> Delivery:
            while True:
                await anyio.lowlevel.checkpoint()
                item = found.take(worker, self._server.clock.now_s(), self._run.by_sequence.get, self._run.last)
                if item is not None:
                    return MemoryDelivery(self._server, found, item)
                await self._server.changed(found.next_due_s())

        try:
            yield Iterating(take)
        finally:
            found.waiting -= 1
            self._server.wake()

    async def load_state(self, key: str) -> tuple[bytes, int] | None:
        check_literal(key)
        await anyio.lowlevel.checkpoint()
        return self._run.state.get(key)

    async def list_state(self, prefix: str) -> Mapping[str, tuple[bytes, int]]:
        check_literal(prefix)
        await anyio.lowlevel.checkpoint()
        return {key: value for key, value in sorted(self._run.state.items()) if key.startswith(f"{prefix}.")}

    async def delete_state(self, key: str) -> None:
        check_literal(key)
        await anyio.lowlevel.checkpoint()
        self._run.state.pop(key, None)

    async def save_state(self, key: str, data: bytes, *, expected_revision: int | None = None) -> int:
        check_literal(key)
        self._server.check_size(key, data, {})
        await anyio.lowlevel.checkpoint()
        stands = self._run.state.get(key, (b"", 0))[1]
        if expected_revision is not None and stands != expected_revision:
            raise ConflictError(f"state {key!r}: expected revision {expected_revision}, found {stands}")
        self._run.state_revision += 1
        self._run.state[key] = (data, self._run.state_revision)
        return self._run.state_revision

    async def announce(self, subject: str, data: bytes) -> None:
        check_literal(subject)
        check_talk_subject(subject)
        await anyio.lowlevel.checkpoint()
        for pattern, hear in list(self._server.listeners.values()):
            if matches(pattern, subject):
                hear(subject, data)
        self._server.wake()

    @asynccontextmanager
    async def listen(self, pattern: str) -> AsyncGenerator[AsyncIterator[tuple[str, bytes]]]:
        check_filter(pattern)
        check_talk_subject(pattern)
        heard: deque[tuple[str, bytes]] = deque(maxlen=LISTEN_BUFFER)
        listener = self._server.new_id()
        self._server.listeners[listener] = (pattern, lambda subject, data: heard.append((subject, data)))

        async def take() -> tuple[str, bytes]:
            while not heard:
                await self._server.changed()
            await anyio.lowlevel.checkpoint_if_cancelled()
            return heard.popleft()

        try:
            yield Iterating(take)
        finally:
            del self._server.listeners[listener]

    async def request(self, subject: str, data: bytes, *, deadline_s: float) -> bytes:
        check_literal(subject)
        check_talk_subject(subject)
        with anyio.move_on_after(deadline_s):
            while not self._server.servers.get(subject):
                await self._server.changed()
            handlers = self._server.servers[subject]
            handlers.append(handlers.pop(0))
            try:
                return await handlers[-1](data)
            except Exception as error:  # a real server would answer with the text; the handler's owner decides nothing
                raise RequestFailedError(f"{subject!r} was answered with an error: {error}") from error
        raise NotConnectedError(f"expected an answer on {subject!r} within {deadline_s} s, found none")

    @asynccontextmanager
    async def serve(self, subject: str, handler: Callable[[bytes], Awaitable[bytes]]) -> AsyncGenerator[None]:
        check_literal(subject)
        check_talk_subject(subject)
        handlers = self._server.servers.setdefault(subject, [])
        handlers.append(handler)
        self._server.wake()
        try:
            yield
        finally:
            handlers.remove(handler)

    async def consumers(self) -> list[ConsumerStatus]:
        await anyio.lowlevel.checkpoint()
        run = self._run
        return [durable.status(run.by_sequence.get, run.last) for durable in run.durables.values()]

    async def log_status(self) -> LogStatus:
        await anyio.lowlevel.checkpoint()
        run = self._run
        return LogStatus(
            first_sequence=run.first,
            last_sequence=run.last,
            num_messages=len(run.by_sequence),
            size_bytes=run.size_bytes,
            max_bytes=run.max_bytes,
            payload_bytes=run.payloads.size_bytes,
            connected_url="memory://",
        )

    async def purge_below(self, sequence: int, *, pattern: str = "") -> int:
        await anyio.lowlevel.checkpoint()
        if pattern:
            check_log_filters(self._names, (pattern,))
        purged = self._run.purge_below(sequence, pattern)
        self._server.wake()
        return purged


def _without_data(record: Record) -> Record:
    headers = {**record.headers, "Nats-Msg-Size": str(len(record.data))}
    return Record(
        subject=record.subject,
        sequence=record.sequence,
        data=b"",
        unix_time_s=record.unix_time_s,
        headers=headers,
    )
