"""The payload store's copies of the newest versions, piece by piece: put, and taken out again when they are old.

A piece that the version before had is not sent again; one that a kept version still names is not taken out. Never more
than a few pieces are in memory.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Final, Protocol

import anyio
import anyio.to_thread
import msgspec

from pipeline.errors import PayloadGoneError
from schemas.messages.training import Part, PartedFile, WeightParts, WeightsManifest, WeightsPublished
from schemas.payload import RUN_STORE, PayloadRef, content_id
from stages.ports import Payloads
from stages.weight_files.parts import spans, tensor_spans

PIECES_AT_ONCE: Final = 8
_LOOK_BACK: Final = 8
"""How many versions before the newest retired one are looked at again: those that a reader held."""


class WeightsStore(Payloads, Protocol):
    """Payloads that can be taken out again."""

    async def delete(self, ref: PayloadRef) -> None: ...


class PublishedWeights(Protocol):
    """What was published before."""

    async def find(self, version: int, generation: int) -> WeightsPublished | None: ...


def nobody() -> Collection[tuple[int, int]]:
    """No reader is on its way."""
    return ()


class Shelf:
    """One run's weights in its payload store."""

    def __init__(
        self,
        payloads: WeightsStore,
        published: PublishedWeights,
        *,
        keep_versions: int,
        held: Callable[[], Collection[tuple[int, int]]] = nobody,
    ) -> None:
        """Args:
        keep_versions: how many versions the store keeps; readers that are further behind go on to the newest.
        held: the (version, generation) that readers are fetching now; these are kept, too.
        """
        self._payloads: Final = payloads
        self._published: Final = published
        self._keep: Final = keep_versions
        self._held: Final = held
        self._pieces: Final[dict[tuple[int, int], dict[str, int]]] = {}
        """Of versions that stand: piece → bytes."""
        self._retired: Final[set[tuple[int, int]]] = set()
        self.sent_bytes = 0
        """Of the last version: what went to the store."""

    async def put(self, folder: str, manifest: WeightsManifest, version: int, generation: int) -> PayloadRef:
        """Store a version's folder; the reference of its `WeightParts`."""
        # Pieces of older versions may have been collected; those of the newest stay until this one is published.
        known = await self._pieces_of(version - 1, generation) if version > 1 else {}
        self.sent_bytes = 0
        sizes = {manifest.file: tensor_spans(manifest), **{f.name: spans(f.size_bytes) for f in manifest.files}}
        files = [
            PartedFile(name, sum(size for _, size in cut), await self._put_file(Path(folder) / name, cut, known))
            for name, cut in sizes.items()
        ]
        data = msgspec.msgpack.encode(WeightParts(files=files))
        ref = await self._payloads.put(data)
        pieces = {part.id: part.size_bytes for file in files for part in file.parts}
        self._pieces[version, generation] = {**pieces, ref.id: ref.size_bytes}
        self._retired.discard((version, generation))
        return ref

    async def _put_file(self, path: Path, cut: list[tuple[int, int]], known: Collection[str]) -> list[Part]:
        parts: dict[int, Part] = {}
        limiter = anyio.CapacityLimiter(PIECES_AT_ONCE)
        descriptor = os.open(path, os.O_RDONLY)

        async def put(offset: int, size: int) -> None:
            async with limiter:
                data = await anyio.to_thread.run_sync(os.pread, descriptor, size, offset)
                piece = content_id(data)
                if piece not in known:
                    await self._payloads.put(data)
                    self.sent_bytes += size
                parts[offset] = Part(offset, size, piece)

        try:
            async with anyio.create_task_group() as tasks:
                for offset, size in cut:
                    tasks.start_soon(put, offset, size)
        finally:
            os.close(descriptor)
        return [parts[offset] for offset in sorted(parts)]

    async def retire(self, version: int, generation: int) -> None:
        """Take out what is older than the versions kept, counted from `version`; messages and manifests stay."""
        last = version - self._keep
        kept = await self._kept(last + 1, version, generation)
        held = self._held()
        old: dict[tuple[int, int], dict[str, int]] = {}
        for standing in range(max(1, last - _LOOK_BACK), last + 1):
            for trainer in range(1, generation + 1):
                key = (standing, trainer)
                if key in held:  # a piece of it may be one of an older version, too
                    kept.update(await self._pieces_of(*key))
                elif key not in self._retired:
                    old[key] = await self._pieces_of(*key)
        for key, pieces in old.items():
            for piece, size in pieces.items():
                if piece not in kept:
                    await self._payloads.delete(PayloadRef(store=RUN_STORE, id=piece, size_bytes=size))
            self._pieces.pop(key, None)
            self._retired.add(key)
        for key in [key for key in self._retired if key[0] < last - _LOOK_BACK]:  # never looked at again
            self._retired.remove(key)

    async def _kept(self, first: int, version: int, generation: int) -> set[str]:
        """The pieces of the versions from `first` on: also of those after `version`, which another worker published when this
        step was handled before or its worker slept.
        """
        kept: set[str] = set()
        standing = max(1, first)
        while True:
            found = [await self._pieces_of(standing, trainer) for trainer in range(1, generation + 1)]
            kept.update(*found)
            if standing >= version and not any(found):
                return kept
            standing += 1

    async def _pieces_of(self, version: int, generation: int) -> dict[str, int]:
        key = (version, generation)
        if key not in self._pieces:
            published = await self._published.find(version, generation)
            if published is None:  # as yet
                return {}
            self._pieces[key] = await self._read_pieces(published)
        return self._pieces[key]

    async def _read_pieces(self, published: WeightsPublished) -> dict[str, int]:
        if published.file is not None:
            return {published.file.id: published.file.size_bytes}
        if published.parts is None:
            return {}
        try:
            parts = msgspec.msgpack.decode(await self._payloads.get(published.parts), type=WeightParts)
        except PayloadGoneError:  # taken out before this process started
            return {}
        pieces = {part.id: part.size_bytes for file in parts.files for part in file.parts}
        return {**pieces, published.parts.id: published.parts.size_bytes}
