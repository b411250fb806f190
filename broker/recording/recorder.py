"""Follows a run's log into a recording: messages in order, and the payloads they name before they are collected.

    broker.read ──▶ pending block ──(bounded)──▶ payloads fetched ──▶ written: payloads, then messages

It must not know stages or commands.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Final

import anyio
import anyio.to_thread
import msgspec
import structlog
from anyio.streams.memory import MemoryObjectSendStream

from broker.api import Broker, RecordBatch
from broker.batches import joined
from broker.errors import PayloadMissingError
from broker.recording.blocks import BLOCK_BYTES, pack_messages, topic_and_entity
from broker.recording.redaction import Redactor, Rule
from broker.recording.references import (
    TOPICS_WITH_PAYLOADS,
    NamedPayload,
    is_wanted,
    may_name_payloads,
    named_in,
    named_in_payload,
)
from broker.recording.writer import RecordingWriter
from schemas.errors import DecodeError, DigestError
from schemas.payload import PayloadRef
from schemas.subjects import PREFIX, Topic
from schemas.topics import topic_named

log = structlog.get_logger("headrace.recorder")

_BLOCKS_AHEAD: Final = 4
_HANDED_OVER_BYTES: Final = 4 * BLOCK_BYTES
"""Enough at once that handing over to the writing thread costs little."""
_FETCHES_AT_ONCE: Final = 16
_FETCHED_BYTES: Final = 32 * 1024 * 1024
"""Payload bytes held in memory at once."""


class RecorderSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How a run is recorded."""

    flush_after_s: float = 0.5
    """A message waits at most this long to be written."""
    report_period_s: float = 5.0
    """How often the owner is told how far the file is. The disk is waited for at a file's end only: what a power cut takes
    from an open file still stands on the log, and the next recorder goes on before it."""
    payload_deadline_s: float = 30.0
    weights: str = "first"
    """Weight files to keep: none | first | all."""
    filters: tuple[str, ...] = ()
    """Subject patterns; none = the whole log."""


class RecorderFigures(msgspec.Struct, kw_only=True):
    """What a recorder did so far."""

    messages: int = 0
    payloads: int = 0
    payload_bytes: int = 0
    missing: int = 0
    """Payloads that were gone before they could be recorded."""
    last_sequence: int = 0


class Recorder:
    """One recorder of one run. `run` ends at the log's present end, or, following, when `stop` was called."""

    def __init__(
        self,
        broker: Broker,
        writer: RecordingWriter,
        settings: RecorderSettings | None = None,
        *,
        rules: Sequence[Rule] = (),
        on_written: Callable[[int], Awaitable[None]] | None = None,
    ) -> None:
        """Args:
        on_written: told the sequence up to which everything is in the file, from time to time.
        """
        self.figures: Final = RecorderFigures(last_sequence=writer.last_sequence)
        self._broker: Final = broker
        self._writer: Final = writer
        self._settings: Final = settings or RecorderSettings()
        self._rules: Final = tuple(rules)
        self._on_written = on_written
        self._pending: list[RecordBatch] = []
        self._pending_bytes = 0
        self._pending_since = 0.0
        self._stopping: Final = anyio.Event()
        self._last_report_s = 0.0

    def stop(self) -> None:
        """Record what stands now, then end."""
        self._stopping.set()

    async def run(self, *, follow: bool = True) -> RecorderFigures:
        """Record until the log's end, or, following, until stopped."""
        send, receive = anyio.create_memory_object_stream[RecordBatch](max_buffer_size=_BLOCKS_AHEAD)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._read, send, follow)
            async with receive:
                async for block in receive:
                    await self._write(block)
        await anyio.to_thread.run_sync(self._writer.close)
        await self._report()
        return self.figures

    async def _read(self, send: MemoryObjectSendStream[RecordBatch], follow: bool) -> None:
        async with send, anyio.create_task_group() as tasks:
            tasks.start_soon(self._flush_now_and_then, send)
            if follow:
                await self._follow(send)
            else:
                await self._read_to_end(send)
            await self._flush(send)
            tasks.cancel_scope.cancel()

    async def _follow(self, send: MemoryObjectSendStream[RecordBatch]) -> None:
        async with anyio.create_task_group() as reading:

            async def end_when_stopped() -> None:
                await self._stopping.wait()
                reading.cancel_scope.cancel()

            reading.start_soon(end_when_stopped)
            async with self._broker.read_batches(self._filters(), after_sequence=self._last_read()) as records:
                await self._take(records, send)
        await self._read_to_end(send)

    async def _read_to_end(self, send: MemoryObjectSendStream[RecordBatch]) -> None:
        async with self._broker.read_batches(
            self._filters(), after_sequence=self._last_read(), follow=False
        ) as records:
            await self._take(records, send)

    def _filters(self) -> list[str]:
        return list(self._settings.filters) or [f"{PREFIX}.{self._broker.run}.>"]

    def _last_read(self) -> int:
        return self.figures.last_sequence

    async def _take(self, records: AsyncIterator[RecordBatch], send: MemoryObjectSendStream[RecordBatch]) -> None:
        # Added before any wait: a reader that is cancelled has its last record in the pending block.
        figures = self.figures
        async for batch in records:
            if not self._pending:
                self._pending_since = anyio.current_time()
            self._pending.append(batch)
            self._pending_bytes += sum(map(len, batch.datas))
            figures.last_sequence = int(batch.sequences[-1])
            if self._pending_bytes >= _HANDED_OVER_BYTES:
                await self._flush(send)

    async def _flush(self, send: MemoryObjectSendStream[RecordBatch]) -> None:
        if self._pending:
            block, self._pending, self._pending_bytes = joined(self._pending), [], 0
            with anyio.CancelScope(shield=True):
                await send.send(block)

    async def _flush_now_and_then(self, send: MemoryObjectSendStream[RecordBatch]) -> None:
        while True:
            await anyio.sleep(self._settings.flush_after_s / 2)
            if self._pending and anyio.current_time() - self._pending_since >= self._settings.flush_after_s / 2:
                await self._flush(send)

    async def _write(self, block: RecordBatch) -> None:
        redactor = Redactor(self._rules) if self._rules else None
        missing: list[str] = []
        decoded = self._decoded(block, redactor)
        await self._write_payloads(decoded, redactor, missing)
        if redactor is not None:
            block = await self._redacted(block, decoded, redactor)
            await anyio.to_thread.run_sync(self._writer.write_payloads, redactor.payloads)
        # Packed here, compressed and written there: the thread holds the interpreter's lock for moments only, and
        # reading goes on beside it.
        packed = pack_messages(block, missing)
        await anyio.to_thread.run_sync(self._writer.write_packed, packed)
        self.figures.messages += len(block)
        self.figures.missing += len(missing)
        now = time.monotonic()
        if now - self._last_report_s >= self._settings.report_period_s:
            self._last_report_s = now
            await self._report()

    async def _report(self) -> None:
        if self._on_written is not None:
            await self._on_written(self._writer.last_sequence)

    @staticmethod
    def _decoded(
        block: RecordBatch, redactor: Redactor | None
    ) -> dict[int, tuple[Topic[msgspec.Struct], msgspec.Struct]]:
        """Those messages of a block that must be looked into, by their number in it."""
        found: dict[int, tuple[Topic[msgspec.Struct], msgspec.Struct]] = {}
        if redactor is None and not may_name_payloads(b"".join(block.datas)):
            return found
        for number, data in enumerate(block.datas):
            if redactor is None and not may_name_payloads(data):
                continue
            name = topic_and_entity(block.subjects[number])[0]
            topic = topic_named(name)
            wanted = name in TOPICS_WITH_PAYLOADS or (redactor is not None and redactor.concerns(name))
            if topic is None or not wanted:
                continue
            try:
                found[number] = (topic, topic.decode(data))
            except DecodeError as error:
                log.warning("a message that can't be decoded is recorded as it is", error=str(error))
        return found

    async def _write_payloads(
        self,
        decoded: dict[int, tuple[Topic[msgspec.Struct], msgspec.Struct]],
        redactor: Redactor | None,
        missing: list[str],
    ) -> None:
        wanted: dict[str, NamedPayload] = {}
        for topic, message in decoded.values():
            # What a rule changes is written in its changed form only, so the original is fetched there and not here.
            if redactor is not None and redactor.concerns(topic.name) and not _keeps_payloads(topic.name):
                continue
            for named in named_in(topic, message):
                if is_wanted(named, message, self._settings.weights):
                    wanted.setdefault(named.ref.id, named)
        while wanted:
            following: dict[str, NamedPayload] = {}
            for batch in _batches([named for named in wanted.values() if not self._holds(named.ref.id)]):
                for named, data in (await self._fetch(batch, missing)).values():
                    for inner in _inner(named, data):
                        following.setdefault(inner.ref.id, inner)
            wanted = following

    def _holds(self, payload_id: str) -> bool:
        return _is_content_id(payload_id) and self._writer.holds(payload_id)

    async def _fetch(
        self, batch: Sequence[NamedPayload], missing: list[str]
    ) -> dict[str, tuple[NamedPayload, memoryview]]:
        got: dict[str, tuple[NamedPayload, memoryview]] = {}
        limit = anyio.CapacityLimiter(_FETCHES_AT_ONCE)

        async def fetch(named: NamedPayload) -> None:
            async with limit:
                data = await self._get(named.ref)
            if data is None:
                missing.append(named.ref.id)
            else:
                got[named.ref.id] = (named, data)

        async with anyio.create_task_group() as tasks:
            for named in batch:
                tasks.start_soon(fetch, named)
        in_order = [(named.ref.id, got[named.ref.id][1]) for named in batch if named.ref.id in got]
        await anyio.to_thread.run_sync(self._writer.write_payloads, in_order)
        self.figures.payloads += len(in_order)
        self.figures.payload_bytes += sum(len(data) for _, data in in_order)
        return got

    async def _get(self, ref: PayloadRef) -> memoryview | None:
        if not _is_content_id(ref.id):
            log.warning("a payload has no content address and is left out", payload=ref.id)
            return None
        try:
            with anyio.fail_after(self._settings.payload_deadline_s):
                return await self._broker.payloads.get(ref)
        except (PayloadMissingError, DigestError, TimeoutError) as error:
            log.warning("a payload could not be recorded", payload=ref.id, error=str(error) or "deadline")
            return None

    async def _redacted(
        self,
        block: RecordBatch,
        decoded: dict[int, tuple[Topic[msgspec.Struct], msgspec.Struct]],
        redactor: Redactor,
    ) -> RecordBatch:
        changed = list(block.datas)
        for number, (topic, message) in decoded.items():
            if not redactor.concerns(topic.name):
                continue
            own: dict[str, memoryview | None] = {}
            if not _keeps_payloads(topic.name):
                for named in named_in(topic, message):
                    own[named.ref.id] = await self._get(named.ref)
            now = redactor.message(topic, message, lambda ref, own=own: own.get(ref.id))
            data = topic.encode(now)
            changed[number] = data
            kept = {named.ref.id for named in named_in(topic, now)}
            redactor.payloads.extend(
                (payload_id, bytes(data)) for payload_id, data in own.items() if data is not None and payload_id in kept
            )
        return msgspec.structs.replace(block, datas=changed)


def _keeps_payloads(topic: str) -> bool:
    """Topics whose payloads no rule may change."""
    return topic in ("trajectory.ready", "step.assembled", "weights.published")


def _inner(named: NamedPayload, data: memoryview) -> list[NamedPayload]:
    try:
        return named_in_payload(named.path, data)
    except msgspec.MsgspecError as error:
        log.warning("a payload can't be looked into", payload=named.ref.id, path=named.path, error=str(error))
        return []


def _is_content_id(payload_id: str) -> bool:
    return len(payload_id) == 32 and all(character in "0123456789abcdef" for character in payload_id)


def _batches(wanted: Sequence[NamedPayload]) -> list[list[NamedPayload]]:
    """Cut so that a batch fits in memory."""
    batches: list[list[NamedPayload]] = []
    size = 0
    for named in wanted:
        if not batches or size + named.ref.size_bytes > _FETCHED_BYTES:
            batches.append([])
            size = 0
        batches[-1].append(named)
        size += named.ref.size_bytes
    return batches
