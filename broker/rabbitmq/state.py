"""Last values in a folder: one file a revision, made by a hard link that only one writer can make. Works on shared folders.

KEY/00000000000000000007      the newest stands; older ones are removed by whoever wrote a newer one
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import Final

import anyio
import anyio.to_thread

from broker.errors import ConflictError, StoreFullError
from schemas.ids import decode_token, encode_token

_DIGITS: Final = 20
_VALUE: Final = b"v"
_FORGOTTEN: Final = b"-"
_KEPT: Final = 2
"""Revisions that stay: a reader may have listed the one before."""


class FolderState:
    """Compare-and-set values of one run."""

    def __init__(self, root: Path) -> None:
        self._root: Final = root
        self._limiter = anyio.CapacityLimiter(4)

    async def load(self, key: str) -> tuple[bytes, int] | None:
        """A value and its revision."""
        return await anyio.to_thread.run_sync(self._load, key, limiter=self._limiter)

    async def save(self, key: str, data: bytes, expected_revision: int | None) -> int:
        """Set a value; its revision.

        Raises:
            ConflictError: another revision stands there.
            StoreFullError: the folder can't be written.
        """
        return await anyio.to_thread.run_sync(self._save, key, data, expected_revision, limiter=self._limiter)

    async def delete(self, key: str) -> None:
        """Forget a value; an unknown key is fine."""
        if await self.load(key) is not None:
            await anyio.to_thread.run_sync(self._save, key, None, None, limiter=self._limiter)

    async def values(self, prefix: str) -> dict[str, tuple[bytes, int]]:
        """The values whose keys begin so, with their revisions."""
        return await anyio.to_thread.run_sync(self._values, prefix, limiter=self._limiter)

    def _values(self, prefix: str) -> dict[str, tuple[bytes, int]]:
        try:
            keys = sorted(decode_token(path.name) for path in self._root.iterdir())
        except FileNotFoundError:
            return {}
        found = ((key, self._load(key)) for key in keys if key.startswith(prefix))
        return {key: value for key, value in found if value is not None}

    def _folder(self, key: str) -> Path:
        return self._root / encode_token(key)

    def _load(self, key: str) -> tuple[bytes, int] | None:
        folder = self._folder(key)
        while True:
            revision = _newest(folder)
            if revision == 0:
                return None
            try:
                held = (folder / _name(revision)).read_bytes()
            except FileNotFoundError:
                continue  # overtaken by newer ones meanwhile
            return (held[1:], revision) if held[:1] == _VALUE else None

    def _save(self, key: str, data: bytes | None, expected: int | None) -> int:
        folder = self._folder(key)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            beside = folder / f".{secrets.token_hex(8)}"
            beside.write_bytes(_FORGOTTEN if data is None else _VALUE + data)
            try:
                return self._link(folder, beside, key, expected)
            finally:
                beside.unlink(missing_ok=True)
        except OSError as error:
            raise StoreFullError(f"state {key!r} can't be written under {self._root}: {error.strerror}") from error

    def _link(self, folder: Path, beside: Path, key: str, expected: int | None) -> int:
        while True:
            newest = _newest(folder)
            value = self._load(key)
            stands = value[1] if value is not None else 0
            if expected is not None and stands != expected:
                raise ConflictError(f"state {key!r}: expected revision {expected}, found {stands}")
            if stands > newest:
                continue  # written meanwhile: look again
            try:
                os.link(beside, folder / _name(newest + 1))
            except FileExistsError:
                continue  # somebody else was first: look again
            for name in _revisions(folder)[:-_KEPT]:
                (folder / name).unlink(missing_ok=True)
            return newest + 1


def _revisions(folder: Path) -> list[str]:
    try:
        return sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))
    except FileNotFoundError:
        return []


def _newest(folder: Path) -> int:
    found = _revisions(folder)
    return int(found[-1]) if found else 0


def _name(revision: int) -> str:
    return f"{revision:0{_DIGITS}d}"
