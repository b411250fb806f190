from __future__ import annotations

import os
from pathlib import Path

import anyio
import anyio.lowlevel
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from weights_case import Broadcast, write_weights

from pipeline.errors import PayloadGoneError
from schemas.messages.training import Part, PartedFile, Tensor, WeightParts, WeightsManifest, WeightsPublished
from schemas.payload import PayloadRef
from stages.ports import WeightsRefusedError
from stages.weight_files import parts as cutting
from stages.weight_files.safetensors_file import FILE_NAME, read_manifest
from stages.weights import node_cache
from stages.weights.node_cache import NodeCache
from stages.weights.shelf import Shelf


class CountedPayloads:
    """The run's payloads, with what was read; may break off after some pieces."""

    def __init__(self, payloads, *, fail_after: int | None = None) -> None:
        self.payloads = payloads
        self.read: list[str] = []
        self.fail_after = fail_after

    async def put(self, data):
        return await self.payloads.put(data)

    async def get(self, ref: PayloadRef):
        if self.fail_after is not None and len(self.read) >= self.fail_after:
            raise OSError(5, "cut off")
        self.read.append(ref.id)
        await anyio.lowlevel.checkpoint()
        return await self.payloads.get(ref)


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cutting, "PART_BYTES", 4096)
    monkeypatch.setattr(cutting, "JOIN_BYTES", 1024)


LARGE = {"shape": (64, 32), "names": ("a", "b", "c", "d")}
"""Four tensors of two pieces each."""


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


async def parts_of(broadcast: Broadcast, published: WeightsPublished) -> WeightParts:
    assert published.parts is not None
    return msgspec.msgpack.decode(await broadcast.payloads.get(published.parts), type=WeightParts)


async def test_all_engines_of_a_node_share_one_transfer(broadcast: Broadcast, tmp_path: Path) -> None:
    parts = await parts_of(broadcast, await broadcast.publish(1, **LARGE))
    counted = CountedPayloads(broadcast.payloads)
    found: list[str] = []

    async def fetch() -> None:
        async with NodeCache(tmp_path / "node", counted).folder(1, 1, parts) as folder:
            found.append(folder)

    async with anyio.create_task_group() as tasks:
        for _ in range(4):
            tasks.start_soon(fetch)
    assert len(found) == 4
    assert len(counted.read) == len(set(counted.read)) == sum(len(file.parts) for file in parts.files)
    assert names(Path(found[0])) == [".parts", "config.json", FILE_NAME]


async def test_a_transfer_that_was_cut_off_goes_on_where_it_was(
    broadcast: Broadcast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_cache, "PIECES_AT_ONCE", 1)
    published = await broadcast.publish(1, **LARGE)
    parts = await parts_of(broadcast, published)
    dying = CountedPayloads(broadcast.payloads, fail_after=5)
    with pytest.raises(WeightsRefusedError, match="cut off"):
        async with NodeCache(tmp_path / "node", dying).folder(1, 1, parts):
            pass
    (left,) = (tmp_path / "node").glob("*.part")
    data = bytearray((left / FILE_NAME).read_bytes())
    data[200] ^= 1  # one of the pieces that were kept is damaged: it is fetched again
    (left / FILE_NAME).write_bytes(data)
    counted = CountedPayloads(broadcast.payloads)
    cache = NodeCache(tmp_path / "node", counted)
    async with cache.folder(1, 1, parts) as folder:
        assert read_manifest(Path(folder) / FILE_NAME) == read_manifest(Path(published.directory) / FILE_NAME)
    assert cache.last.resumed_bytes > 0
    assert 0 < len(counted.read) < sum(len(file.parts) for file in parts.files)


async def test_only_changed_tensors_are_sent_and_fetched(broadcast: Broadcast, tmp_path: Path) -> None:
    cache = NodeCache(tmp_path / "node", broadcast.payloads)
    same = ("a", "c", "d")
    first = await broadcast.publish(1, **LARGE, same=same)
    async with cache.folder(1, 1, await parts_of(broadcast, first)):
        whole = cache.last.fetched_bytes
    second = await broadcast.publish(2, **LARGE, same=same)
    assert broadcast.shelf.sent_bytes < whole / 3
    async with cache.folder(2, 1, await parts_of(broadcast, second)) as folder:
        assert cache.last.fetched_bytes == broadcast.shelf.sent_bytes == 64 * 32 * 4
        assert read_manifest(Path(folder) / FILE_NAME) == read_manifest(Path(second.directory) / FILE_NAME)


async def test_pieces_that_a_kept_version_shares_survive_the_old_one(broadcast: Broadcast, tmp_path: Path) -> None:
    for version in range(1, 5):
        newest = await broadcast.publish(version, **LARGE, same=("a", "b"))
    async with NodeCache(tmp_path / "node", broadcast.payloads).folder(
        4, 1, await parts_of(broadcast, newest)
    ) as folder:
        assert read_manifest(Path(folder) / FILE_NAME) == read_manifest(Path(newest.directory) / FILE_NAME)


async def check_that_it_can_be_fetched(broadcast: Broadcast, folder: Path, published: WeightsPublished) -> None:
    cache = NodeCache(folder, broadcast.payloads)
    async with cache.folder(published.version, published.generation, await parts_of(broadcast, published)) as found:
        assert read_manifest(Path(found) / FILE_NAME) == read_manifest(Path(published.directory) / FILE_NAME)


async def test_a_piece_that_a_version_being_read_shares_with_an_older_one_survives_that(
    broadcast: Broadcast, tmp_path: Path
) -> None:
    broadcast.held.update({(1, 1), (2, 1)})
    first = await broadcast.publish(1, **LARGE, same=("a", "b"))
    read = await broadcast.publish(2, **LARGE, same=("a", "b"))
    for version in (3, 4, 5):  # nothing of them is the same
        await broadcast.publish(version, **LARGE)
    broadcast.held.discard((1, 1))
    await broadcast.publish(6, **LARGE)
    await check_that_it_can_be_fetched(broadcast, tmp_path / "node", read)
    with pytest.raises(PayloadGoneError):
        await parts_of(broadcast, first)


async def test_a_step_that_is_handled_again_late_takes_nothing_from_newer_versions(
    broadcast: Broadcast, tmp_path: Path
) -> None:
    broadcast.held.add((1, 1))
    for version in (1, 2, 3):
        await broadcast.publish(version, seed=version, **LARGE)
    newest = await broadcast.publish(4, seed=1, **LARGE)  # what changed is as it was
    broadcast.held.clear()
    other = Shelf(broadcast.payloads, broadcast.published, keep_versions=2)
    await other.retire(3, 1)
    await check_that_it_can_be_fetched(broadcast, tmp_path / "node", newest)


async def test_a_version_that_was_not_published_as_yet_is_looked_for_again(
    broadcast: Broadcast, tmp_path: Path
) -> None:
    broadcast.held.add((2, 1))
    worker = Shelf(broadcast.payloads, broadcast.published, keep_versions=3)
    await broadcast.publish(1, seed=1, **LARGE)
    await worker.retire(3, 1)  # another worker is still at version 2
    second = await broadcast.publish(2, seed=1, **LARGE)
    for version in (3, 4):
        await broadcast.publish(version, **LARGE)
    await worker.retire(4, 1)
    await check_that_it_can_be_fetched(broadcast, tmp_path / "node", second)


async def test_a_piece_that_lies_about_its_content_is_not_copied_from_another_version(
    broadcast: Broadcast, tmp_path: Path
) -> None:
    cache = NodeCache(tmp_path / "node", broadcast.payloads)
    async with cache.folder(1, 1, await parts_of(broadcast, await broadcast.publish(1, **LARGE))) as folder:
        path = Path(folder) / FILE_NAME
        path.write_bytes(bytes(len(path.read_bytes())))
    second = await broadcast.publish(2, seed=1, **LARGE)
    async with cache.folder(2, 1, await parts_of(broadcast, second)) as folder:
        assert cache.last.copied_bytes == (Path(folder) / "config.json").stat().st_size
        assert read_manifest(Path(folder) / FILE_NAME) == read_manifest(Path(second.directory) / FILE_NAME)


async def test_old_versions_leave_the_node_unless_they_are_read(broadcast: Broadcast, tmp_path: Path) -> None:
    node = tmp_path / "node"
    first = await parts_of(broadcast, await broadcast.publish(1))
    async with NodeCache(node, broadcast.payloads).folder(1, 1, first):
        for version in range(2, 5):
            parts = await parts_of(broadcast, await broadcast.publish(version))
            async with NodeCache(node, broadcast.payloads).folder(version, 1, parts):
                pass
        assert "v0000001-g1" in names(node)
    assert names(node) == [
        "v0000003-g1",
        "v0000003-g1.lock",
        "v0000004-g1",
        "v0000004-g1.lock",
    ]


@pytest.mark.parametrize(
    "file",
    [
        PartedFile("../evil", 4, [Part(0, 4, "0" * 32)]),
        PartedFile(".hidden", 4, [Part(0, 4, "0" * 32)]),
        PartedFile("a", 4, [Part(0, 2, "0" * 32), Part(3, 1, "0" * 32)]),
        PartedFile("a", 5, [Part(0, 4, "0" * 32)]),
    ],
)
async def test_an_index_that_makes_no_file_is_refused_before_anything_is_written(
    broadcast: Broadcast, tmp_path: Path, file: PartedFile
) -> None:
    with pytest.raises(WeightsRefusedError):
        async with NodeCache(tmp_path / "node", broadcast.payloads).folder(1, 1, WeightParts(files=[file])):
            pass
    assert not (tmp_path / "node").exists()


async def test_memory_is_bounded_by_the_pieces_in_flight(broadcast: Broadcast, tmp_path: Path, monkeypatch) -> None:
    sizes: list[int] = []
    read = os.pread

    def pread(descriptor: int, size: int, offset: int) -> bytes:
        sizes.append(size)
        return read(descriptor, size, offset)

    monkeypatch.setattr(os, "pread", pread)
    await broadcast.publish(1, shape=(512, 64))
    assert max(sizes) == 4096


@given(st.lists(st.integers(0, 20_000), max_size=30), st.integers(8, 6000))
def test_pieces_cover_the_file_without_gaps_and_begin_where_large_tensors_begin(sizes: list[int], header: int) -> None:
    tensors, offset = [], 0
    for number, size in enumerate(sizes):
        tensors.append(Tensor(f"t{number}", "U8", [size], offset, size, ""))
        offset += size
    found = cutting.tensor_spans(WeightsManifest(tensors=tensors, total_bytes=header + offset))
    end = 0
    for start, size in found:
        assert start == end
        assert 0 < size <= cutting.PART_BYTES
        end += size
    assert end == header + offset
    starts = {start for start, _ in found}
    assert all(header + t.offset in starts for t in tensors if t.size_bytes >= cutting.JOIN_BYTES)


def test_a_file_that_was_cut_is_the_same_however_its_tensors_are_ordered(tmp_path: Path) -> None:
    manifest = read_manifest(write_weights(tmp_path, 1, **LARGE))
    turned = msgspec.structs.replace(manifest, tensors=manifest.tensors[::-1])
    assert cutting.tensor_spans(manifest) == cutting.tensor_spans(turned)
