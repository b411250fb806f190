"""Payloads in a dictionary."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable

import anyio.lowlevel

from broker.api import StoredPayload
from broker.errors import PayloadMissingError
from broker.naming import inline_payload
from schemas.payload import RUN_STORE, PayloadRef, check_payload, content_id


class MemoryPayloads:
    """A `PayloadStore` that lasts as long as the process."""

    def __init__(self) -> None:
        self.blobs: dict[str, bytes] = {}
        self._stored_s: dict[str, float] = {}
        self.renew_after_s = 300.0
        self.now: Callable[[], float] = time.time

    @property
    def name(self) -> str:
        return "memory"

    @property
    def size_bytes(self) -> int:
        return sum(map(len, self.blobs.values()))

    async def put(self, data: bytes | memoryview) -> PayloadRef:
        await anyio.lowlevel.checkpoint()
        payload_id = content_id(data)
        self.blobs.setdefault(payload_id, bytes(data))
        now_s = self.now()
        if now_s - self._stored_s.get(payload_id, 0.0) > self.renew_after_s:
            self._stored_s[payload_id] = now_s
        return PayloadRef(store=RUN_STORE, id=payload_id, size_bytes=len(data))

    async def get(self, ref: PayloadRef) -> memoryview:
        await anyio.lowlevel.checkpoint()
        inside = inline_payload(ref)
        if inside is not None:
            return inside
        blob = self.blobs.get(ref.id)
        if blob is None:
            raise PayloadMissingError(f"payload {ref.id} ({ref.size_bytes} bytes) is not in the memory store")
        check_payload(ref, blob)
        return memoryview(blob)

    async def delete(self, payload_id: str) -> None:
        await anyio.lowlevel.checkpoint()
        self.blobs.pop(payload_id, None)
        self._stored_s.pop(payload_id, None)

    async def stored(self, *, before_unix_s: float) -> AsyncIterator[StoredPayload]:
        for payload_id, stored_s in list(self._stored_s.items()):
            await anyio.lowlevel.checkpoint()
            if stored_s < before_unix_s and payload_id in self.blobs:
                size = len(self.blobs[payload_id])
                revision = int(stored_s * 1e9)
                yield StoredPayload(id=payload_id, size_bytes=size, unix_time_s=stored_s, revision=revision)

    async def collect(self, payload: StoredPayload) -> None:
        if int(self._stored_s.get(payload.id, 0.0) * 1e9) <= payload.revision:
            await self.delete(payload.id)
