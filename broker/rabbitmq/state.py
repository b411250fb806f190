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
from schemas.ids import encode_token

_DIGITS: Final = 20
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
        """Forget a value."""
        await anyio.to_thread.run_sync(self._delete, key, limiter=self._limiter)

    async def keys(self, prefix: str) -> list[str]:
        """The keys that begin so, as they were given (they are safe tokens)."""

        def find() -> list[str]:
            try:
                return sorted(name for name in os.listdir(self._root) if name.startswith(prefix))
            except FileNotFoundError:
                return []

        return await anyio.to_thread.run_sync(find, limiter=self._limiter)

    def _folder(self, key: str) -> Path:
        return self._root / encode_token(key)

    def _load(self, key: str) -> tuple[bytes, int] | None:
        folder = self._folder(key)
        while True:
            revision = _newest(folder)
            if revision == 0:
                return None
            try:
                return (folder / _name(revision)).read_bytes(), revision
            except FileNotFoundError:
                continue  # overtaken by two newer ones meanwhile

    def _save(self, key: str, data: bytes, expected: int | None) -> int:
        folder = self._folder(key)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            beside = folder / f".{secrets.token_hex(8)}"
            beside.write_bytes(data)
            try:
                return self._link(folder, beside, key, expected)
            finally:
                beside.unlink(missing_ok=True)
        except OSError as error:
            raise StoreFullError(f"state {key!r} can't be written under {self._root}: {error.strerror}") from error

    def _link(self, folder: Path, beside: Path, key: str, expected: int | None) -> int:
        while True:
            stands = _newest(folder)
            if expected is not None and stands != expected:
                raise ConflictError(f"state {key!r}: expected revision {expected}, found {stands}")
            try:
                os.link(beside, folder / _name(stands + 1))
            except FileExistsError:
                continue  # somebody else was first: look again
            for name in _revisions(folder)[:-_KEPT]:
                (folder / name).unlink(missing_ok=True)
            return stands + 1

    def _delete(self, key: str) -> None:
        folder = self._folder(key)
        for name in _revisions(folder):
            (folder / name).unlink(missing_ok=True)
        try:
            folder.rmdir()
        except OSError:
            return  # never there, or somebody writes it anew


def _revisions(folder: Path) -> list[str]:
    try:
        return sorted(name for name in os.listdir(folder) if not name.startswith("."))
    except FileNotFoundError:
        return []


def _newest(folder: Path) -> int:
    found = _revisions(folder)
    return int(found[-1]) if found else 0


def _name(revision: int) -> str:
    return f"{revision:0{_DIGITS}d}"
