"""Payloads as files: one a payload, named by its checksum, in 256 folders.

A file appears whole or not at all (written beside, then renamed). For a shared file system, and for large payloads that
a broker should not carry. It must not know what a payload means.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

import anyio
import anyio.to_thread

from broker.api import StoredPayload
from broker.errors import PayloadMissingError, StoreFullError
from broker.naming import inline_payload
from schemas.ids import is_safe_token
from schemas.payload import RUN_STORE, PayloadRef, check_payload, content_id

PARALLEL: Final = 8
"""Files of one store that are read or written at the same time."""


class DirectoryPayloads:
    """A `PayloadStore` in a folder."""

    def __init__(self, root: str | Path, *, fsync: bool = False, renew_after_s: float = 300.0) -> None:
        """Args:
        root: The folder, made on first use.
        renew_after_s: Storing what stands there already makes it young again when it is older.
        fsync: Force each payload to disk before `put` returns: survives a power cut, costs some milliseconds each.
        """
        self._root = Path(root)
        self._fsync = fsync
        self._renew_after_s = renew_after_s
        self._limiter = anyio.CapacityLimiter(PARALLEL)

    @property
    def name(self) -> str:
        return "directory"

    async def put(self, data: bytes | memoryview) -> PayloadRef:
        view = memoryview(data).cast("B") if len(data) else memoryview(b"")
        ref = PayloadRef(store=RUN_STORE, id=content_id(view), size_bytes=len(view))
        await anyio.to_thread.run_sync(self._write, ref, view, limiter=self._limiter)
        return ref

    async def get(self, ref: PayloadRef) -> memoryview:
        inside = inline_payload(ref)
        if inside is not None:
            return inside
        return memoryview(await anyio.to_thread.run_sync(self._read, ref, limiter=self._limiter))

    async def delete(self, payload_id: str) -> None:
        path = self._path(payload_id)
        await anyio.to_thread.run_sync(lambda: path.unlink(missing_ok=True), limiter=self._limiter)

    async def collect(self, payload: StoredPayload) -> None:
        await anyio.to_thread.run_sync(self._collect, payload, limiter=self._limiter)

    def _collect(self, payload: StoredPayload) -> None:
        path = self._path(payload.id)
        try:
            if path.stat().st_mtime_ns <= payload.revision:
                path.unlink()
        except FileNotFoundError:
            return

    async def stored(self, *, before_unix_s: float) -> AsyncIterator[StoredPayload]:
        for folder in range(256):
            found = await anyio.to_thread.run_sync(self._list, f"{folder:02x}", before_unix_s, limiter=self._limiter)
            for payload in found:
                yield payload

    def _list(self, folder: str, before_unix_s: float) -> list[StoredPayload]:
        found: list[StoredPayload] = []
        try:
            entries = list(os.scandir(self._root / folder))
        except FileNotFoundError:
            return found
        for entry in entries:
            if entry.name.startswith("."):
                continue  # being written
            try:
                stat = entry.stat()
            except FileNotFoundError:
                continue  # deleted meanwhile
            if stat.st_mtime < before_unix_s:
                payload_id = folder + entry.name
                listed = StoredPayload(
                    id=payload_id, size_bytes=stat.st_size, unix_time_s=stat.st_mtime, revision=stat.st_mtime_ns
                )
                found.append(listed)
        return found

    def _path(self, payload_id: str) -> Path:
        if not is_safe_token(payload_id) or len(payload_id) < 3:
            raise PayloadMissingError(f"expected a payload id of hex digits, found {payload_id!r}")
        return self._root / payload_id[:2] / payload_id[2:]

    def _write(self, ref: PayloadRef, view: memoryview) -> None:
        path = self._path(ref.id)
        if self._stands(path, ref):
            return
        beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with beside.open("wb") as file:
                file.write(view)
                if self._fsync:
                    file.flush()
                    os.fsync(file.fileno())
            beside.replace(path)
            if self._fsync:
                _sync_folder(path.parent)
        except OSError as error:
            beside.unlink(missing_ok=True)
            raise StoreFullError(
                f"payload {ref.id} ({ref.size_bytes} bytes) can't be written under {self._root}: {error.strerror}"
            ) from error

    def _stands(self, path: Path, ref: PayloadRef) -> bool:
        """Whether the payload is there, young enough now not to be collected before it is named."""
        try:
            stat = path.stat()
            if stat.st_size != ref.size_bytes:
                return False
            if time.time() - stat.st_mtime > self._renew_after_s:
                os.utime(path)
        except FileNotFoundError:
            return False
        return True

    def _read(self, ref: PayloadRef) -> bytes:
        try:
            data = self._path(ref.id).read_bytes()
        except FileNotFoundError as error:
            raise PayloadMissingError(
                f"payload {ref.id} ({ref.size_bytes} bytes) is not under {self._root}: never stored there, or collected"
            ) from error
        check_payload(ref, data)
        return data


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
