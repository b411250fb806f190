"""A node's copies of published weights, fetched from the payload store once for all engines of the node.

    v0000007-g1.lock    v0000007-g1.part/ ──every piece right──▶ v0000007-g1/

A file lock a version lets one engine fetch while the others wait. Pieces go straight to their place in a file of the
final size, a few at a time. What a killed transfer left is kept where a piece's bytes have its checksum; pieces that a
version here has already are copied instead of fetched.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import anyio
import anyio.to_thread
import msgspec

from schemas.messages.training import Part, PartedFile, WeightParts
from schemas.payload import RUN_STORE, PayloadRef, content_id
from stages.ports import Payloads, WeightsRefusedError
from stages.weight_files.folders import version_folder, versions_in

PIECES_AT_ONCE: Final = 8
_INDEX: Final = ".parts"
_LOCK_PERIOD_S: Final = 0.05


class Transfer(msgspec.Struct, kw_only=True):
    """Where the bytes of the last version came from."""

    fetched_bytes: int = 0
    copied_bytes: int = 0
    """From other versions on this node."""
    resumed_bytes: int = 0
    """Left by a transfer that was cut off."""


class NodeCache:
    """The cache of one node, seen by one engine's process."""

    def __init__(self, folder: str | Path, payloads: Payloads, *, keep_versions: int = 2) -> None:
        self._root: Final = Path(folder)
        self._payloads: Final = payloads
        self._keep: Final = keep_versions
        self.last = Transfer()

    @asynccontextmanager
    async def folder(self, version: int, generation: int, parts: WeightParts) -> AsyncGenerator[str]:
        """A version's folder on this node, which stays while the block runs.

        Raises:
            WeightsRefusedError: the pieces make no file, or the disk is full.
            PayloadGoneError, DigestError: the store does not hold a piece, or holds other bytes.
        """
        target = Path(version_folder(str(self._root), version, generation))
        _check(parts)
        self._root.mkdir(parents=True, exist_ok=True)
        descriptor = await _lock(target.with_name(f"{target.name}.lock"))
        try:
            self.last = Transfer()
            if not await anyio.to_thread.run_sync(target.is_dir):
                await self._fetch(target, parts)
            fcntl.flock(descriptor, fcntl.LOCK_SH)  # others of the node may load it at the same time
            yield str(target)
        finally:
            os.close(descriptor)
            await anyio.to_thread.run_sync(self._prune)

    def forget(self, version: int, generation: int) -> None:
        """Drop a version: what lies here is not what was published."""
        shutil.rmtree(version_folder(str(self._root), version, generation), ignore_errors=True)

    async def _fetch(self, target: Path, parts: WeightParts) -> None:
        part_folder = target.with_name(f"{target.name}.part")
        try:
            part_folder.mkdir(exist_ok=True)
            donors = await anyio.to_thread.run_sync(self._donors)
            for file in parts.files:
                await self._fetch_file(part_folder / file.name, file, donors)
            (part_folder / _INDEX).write_bytes(msgspec.msgpack.encode(parts))
            part_folder.rename(target)
        except OSError as error:
            raise WeightsRefusedError(
                f"{target}: the weights can't be written here ({error.strerror}): free space, or set "
                "engine.weights_cache to a folder on another disk"
            ) from error

    async def _fetch_file(self, path: Path, file: PartedFile, donors: dict[str, tuple[Path, int]]) -> None:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        limiter = anyio.CapacityLimiter(PIECES_AT_ONCE)
        try:
            missing = await anyio.to_thread.run_sync(self._missing, descriptor, file, donors)

            async def fetch(part: Part) -> None:
                async with limiter:
                    ref = PayloadRef(store=RUN_STORE, id=part.id, size_bytes=part.size_bytes)
                    data = await self._payloads.get(ref)
                    await anyio.to_thread.run_sync(os.pwrite, descriptor, data, part.offset)
                    self.last.fetched_bytes += part.size_bytes

            async with anyio.create_task_group() as tasks:
                for part in missing:
                    tasks.start_soon(fetch, part)
        except BaseExceptionGroup as group:
            raise _first(group) from group
        finally:
            os.close(descriptor)

    def _missing(self, descriptor: int, file: PartedFile, donors: dict[str, tuple[Path, int]]) -> list[Part]:
        """The pieces that have to be fetched; what a former try left, and what other versions have, is put in place."""
        had_bytes = os.fstat(descriptor).st_size
        os.ftruncate(descriptor, file.size_bytes)
        missing: list[Part] = []
        for part in file.parts:
            if part.offset + part.size_bytes <= had_bytes and _is(
                os.pread(descriptor, part.size_bytes, part.offset), part
            ):
                self.last.resumed_bytes += part.size_bytes
            elif (data := _donated(part, donors)) is not None:
                os.pwrite(descriptor, data, part.offset)
                self.last.copied_bytes += part.size_bytes
            else:
                missing.append(part)
        return missing

    def _donors(self) -> dict[str, tuple[Path, int]]:
        """Where pieces lie in the versions of this node: id → file and offset. They are checked when they are used."""
        found: dict[str, tuple[Path, int]] = {}
        for _version, _generation, folder in versions_in(str(self._root)):
            try:
                parts = msgspec.msgpack.decode((folder / _INDEX).read_bytes(), type=WeightParts)
            except (OSError, msgspec.MsgspecError):  # pruned meanwhile, or not ours: its pieces are fetched
                continue
            for file in parts.files:
                found.update((part.id, (folder / file.name, part.offset)) for part in file.parts)
        return found

    def _prune(self) -> None:
        """Delete all but the newest versions, and leftovers of transfers, unless somebody holds them."""
        keep = {folder.name for _, _, folder in versions_in(str(self._root))[-self._keep :]}
        newest = max(keep, default="")
        for lock in sorted(self._root.glob("v*-g*.lock")):
            name = lock.stem
            part = self._root / f"{name}.part"
            if name in keep or (part.is_dir() and name > newest):
                continue
            try:
                descriptor = os.open(lock, os.O_RDWR)
            except FileNotFoundError:
                continue
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(self._root / name, ignore_errors=True)
                shutil.rmtree(part, ignore_errors=True)
                lock.unlink(missing_ok=True)
            except BlockingIOError:  # an engine reads or fetches it
                continue
            finally:
                os.close(descriptor)


async def _lock(path: Path) -> int:
    """Hold a file's lock alone; waits for who has it. A descriptor: closing it lets go."""
    while (descriptor := _try_lock(path)) is None:
        await anyio.sleep(_LOCK_PERIOD_S)
    return descriptor


def _try_lock(path: Path) -> int | None:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(descriptor).st_ino == path.stat().st_ino:
            return descriptor
    except (BlockingIOError, FileNotFoundError):  # held, or pruned between two looks
        pass
    os.close(descriptor)
    return None


def _check(parts: WeightParts) -> None:
    """Pieces that overlap, leave gaps or point elsewhere are refused before anything is written."""
    for file in parts.files:
        if not file.name or Path(file.name).name != file.name or file.name.startswith("."):
            raise WeightsRefusedError(f"expected the name of a file in the folder, found {file.name!r}")
        end = 0
        for part in file.parts:
            if part.offset != end or part.size_bytes < 0:
                raise WeightsRefusedError(f"{file.name}: expected a piece at {end}, found one at {part.offset}")
            end += part.size_bytes
        if end != file.size_bytes:
            raise WeightsRefusedError(f"{file.name}: expected {file.size_bytes} bytes in pieces, found {end}")


def _donated(part: Part, donors: dict[str, tuple[Path, int]]) -> bytes | None:
    place = donors.get(part.id)
    if place is None:
        return None
    path, offset = place
    try:
        with path.open("rb") as file:
            data = os.pread(file.fileno(), part.size_bytes, offset)
    except OSError:  # pruned meanwhile: it is fetched
        return None
    return data if _is(data, part) else None


def _is(data: bytes, part: Part) -> bool:
    return len(data) == part.size_bytes and content_id(data) == part.id


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    found: BaseException = group
    while isinstance(found, BaseExceptionGroup):
        found = found.exceptions[0]  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType] - a group's generic argument is lost
    return found
