"""Payloads in a stream of their own, on a connection of their own: cut into chunks `hrp.<run>.<id>.<n>`.

The id is the content's checksum, so storing twice stores once. Chunks are read by subject, several at a time, straight
into place. It must not know what a payload means.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Final

import numpy as np

from broker.api import StoredPayload
from broker.errors import PayloadMissingError
from broker.jetstream.api import call
from broker.jetstream.headers import header
from broker.jetstream.link import Link
from broker.jetstream.parallel import for_each
from broker.jetstream.publish import Gate, get_last_answer, send, stored_from
from broker.jetstream.questions import Answer
from broker.jetstream.read import read
from broker.naming import RunNames, inline_payload
from broker.shapes import Purged, StreamInfo
from schemas.payload import RUN_STORE, PayloadRef, check_payload, content_id

HEADROOM_BYTES: Final = 4096
"""Of max_payload, kept for subject and headers."""
PARALLEL_CHUNKS: Final = 8
_CHUNKS: Final = b"Chunks"
_SIZE: Final = b"Size"


class JetStreamPayloads:
    """A `PayloadStore` in JetStream."""

    def __init__(self, link: Link, names: RunNames) -> None:
        self._link = link
        self._names = names
        self._gate = Gate(link.settings.max_in_flight, link.settings.max_in_flight_bytes)

    @property
    def name(self) -> str:
        return "jetstream"

    async def put(self, data: bytes | memoryview) -> PayloadRef:
        view = memoryview(data).cast("B") if len(data) else memoryview(b"")
        ref = PayloadRef(store=RUN_STORE, id=content_id(view), size_bytes=len(view))
        size = min(self._link.settings.payload_chunk_bytes, self._link.client.max_payload - HEADROOM_BYTES)
        chunks = [view[start : start + size] for start in range(0, len(view), size)] or [view]
        first = await self._put_chunk(ref, 0, chunks[0], len(chunks))
        renew = not first and await self._is_old(ref)
        if not first and not renew and await self._is_whole(ref.id, len(chunks)):
            return ref
        if renew:
            await self._put_chunk(ref, 0, chunks[0], len(chunks), renew=True)
        if len(chunks) > 1:

            async def put(index: int) -> None:
                await self._put_chunk(ref, index, chunks[index], len(chunks), renew=renew)

            await for_each(range(1, len(chunks)), put, at_once=PARALLEL_CHUNKS)
        return ref

    async def _put_chunk(
        self, ref: PayloadRef, index: int, chunk: memoryview, num_chunks: int, *, renew: bool = False
    ) -> bool:
        """Store one chunk, with `renew` in the place of the one that stands there; False if one stood there."""
        head = b"%b: %d\r\n%b: %d\r\n" % (_CHUNKS, num_chunks, _SIZE, ref.size_bytes)
        if not renew:
            head = b"Nats-Expected-Last-Subject-Sequence: 0\r\n" + head
        until_s = time.monotonic() + self._link.settings.publish_deadline_s
        await self._gate.enter(len(chunk))
        try:
            ack, _ = await send(self._link, self._subject(ref.id, index), chunk, head, until_s)
        finally:
            self._gate.leave(len(chunk))
        return ack.error is None

    async def _is_old(self, ref: PayloadRef) -> bool:
        """Whether what stands there must be renewed; true where it is gone again."""
        answer = await get_last_answer(self._link, self._names.payload_stream, self._subject(ref.id, 0))
        if answer is None:
            return True
        age_s = time.time() - stored_from(answer).record.unix_time_s
        return age_s > self._link.settings.payload_renew_after_s

    async def _is_whole(self, payload_id: str, num_chunks: int) -> bool:
        if num_chunks == 1:
            return True
        info = await call(
            self._link,
            f"STREAM.INFO.{self._names.payload_stream}",
            {"subjects_filter": f"{self._names.payload_prefix}{payload_id}.>"},
            StreamInfo,
        )
        return len(info.state.subjects or {}) == num_chunks

    async def get(self, ref: PayloadRef) -> memoryview:
        inside = inline_payload(ref)
        if inside is not None:
            return inside
        first = await self._get_chunk(ref, 0)
        num_chunks = int(header(first.headers, _CHUNKS) or 1)
        if num_chunks == 1:
            check_payload(ref, first.data)
            return memoryview(first.data)
        # Every chunk but the last has the size of the first.
        size = len(first.data)
        whole = np.empty(
            max(ref.size_bytes, size), dtype=np.uint8
        ).data  # not a bytearray: that would be filled with zeros first
        whole[:size] = first.data

        async def fetch(index: int) -> None:
            chunk = (await self._get_chunk(ref, index)).data
            start = index * size
            if start + len(chunk) > len(whole):
                check_payload(ref, chunk)  # of another size than the reference says: raises
            whole[start : start + len(chunk)] = chunk

        await for_each(range(1, num_chunks), fetch, at_once=PARALLEL_CHUNKS)
        check_payload(ref, whole)
        return whole.toreadonly()

    async def _get_chunk(self, ref: PayloadRef, index: int) -> Answer:
        answer = await get_last_answer(self._link, self._names.payload_stream, self._subject(ref.id, index))
        if answer is None:
            raise PayloadMissingError(
                f"payload {ref.id} ({ref.size_bytes} bytes): chunk {index} is not in {self._names.payload_stream}; "
                "it was never stored there, or collected"
            )
        return answer

    async def delete(self, payload_id: str) -> None:
        pattern = f"{self._names.payload_prefix}{payload_id}.>"
        await call(self._link, f"STREAM.PURGE.{self._names.payload_stream}", {"filter": pattern}, Purged)

    async def stored(self, *, before_unix_s: float) -> AsyncIterator[StoredPayload]:
        """In the order in which they were stored."""
        names = self._names
        filters = (f"{names.payload_prefix}*.0",)
        revision = (await call(self._link, f"STREAM.INFO.{names.payload_stream}", None, StreamInfo)).state.last_seq
        async with read(self._link, names.payload_stream, filters, 0, follow=False, headers_only=True) as chunks:
            async for chunk in chunks:
                if chunk.unix_time_s >= before_unix_s:
                    return
                payload_id = chunk.subject.split(".")[2]
                size = int(chunk.headers.get(_SIZE.decode(), 0))
                yield StoredPayload(id=payload_id, size_bytes=size, unix_time_s=chunk.unix_time_s, revision=revision)

    async def collect(self, payload: StoredPayload) -> None:
        pattern = f"{self._names.payload_prefix}{payload.id}.>"
        body = {"filter": pattern, "seq": payload.revision + 1}
        await call(self._link, f"STREAM.PURGE.{self._names.payload_stream}", body, Purged)

    def _subject(self, payload_id: str, index: int) -> str:
        return f"{self._names.payload_prefix}{payload_id}.{index}"
