from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from weights_case import Broadcast, write_weights

from pipeline.errors import PayloadGoneError, RefusedError
from pipeline.generations import Generations
from schemas.messages.training import StepTrained, WeightParts, WeightsManifest
from stages.ports import WeightsRefusedError
from stages.weight_files.folders import version_folder
from stages.weight_files.safetensors_file import FILE_NAME, check_against, read_manifest, weights_digest
from stages.weights.broadcast import broadcast_weights
from stages.weights.receive import not_superseded, supersedes


def sizes(folder: str) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in Path(folder).iterdir()}


async def test_a_version_is_published_with_the_checksum_of_every_tensor(broadcast: Broadcast) -> None:
    published = await broadcast.publish(1)
    manifest = msgspec.msgpack.decode(await broadcast.payloads.get(published.manifest), type=WeightsManifest)
    assert [tensor.name for tensor in manifest.tensors] == ["a", "b"]
    assert manifest.tensors[1].offset == manifest.tensors[0].size_bytes == 48
    assert published.digest == weights_digest(manifest)
    assert [file.name for file in manifest.files] == ["config.json"]
    assert published.parts is not None
    parts = msgspec.msgpack.decode(await broadcast.payloads.get(published.parts), type=WeightParts)
    assert {file.name: file.size_bytes for file in parts.files} == sizes(published.directory)


async def test_equal_weights_have_equal_digests_whatever_their_version(broadcast: Broadcast) -> None:
    one, two, other = [await broadcast.publish(v, seed=s) for v, s in ((1, 7), (2, 7), (3, 8))]
    assert one.digest == two.digest != other.digest


async def test_an_engine_loads_the_newest_version_and_says_so(broadcast: Broadcast) -> None:
    for version in (1, 2):
        broadcast.receiver.offer(await broadcast.publish(version))
    assert await broadcast.receiver.load(await broadcast.publish(3))
    assert broadcast.loads == [3]
    assert (broadcast.said[0].version, broadcast.said[0].engine) == (3, "scripted")


async def test_without_the_folder_the_file_comes_from_the_store(broadcast: Broadcast, tmp_path: Path) -> None:
    published = await broadcast.publish(1)
    elsewhere = msgspec.structs.replace(published, directory=str(tmp_path / "another-node"))
    assert await broadcast.receiver.load(elsewhere)
    folder, version, _ = broadcast.engine.loads[0]
    assert version == 1
    assert read_manifest(Path(folder) / FILE_NAME) == read_manifest(Path(published.directory) / FILE_NAME)


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-5])


def _truncate_header(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:6])


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (
            lambda path: (path.parent / "config.json").unlink(),
            "config.json was published with these weights and is missing",
        ),
        (lambda path: (path.parent / "config.json").write_text("{}"), "config.json: expected 23 bytes"),
        (lambda path: path.unlink(), "expected a safetensors file"),
        (_truncate, "truncated"),
        (_truncate_header, "truncated"),
        (_flip, "checksum"),
        (lambda path: write_weights(path.parent, 1, shape=(3, 4)), "expected F32"),
        (lambda path: write_weights(path.parent, 1, names=("a", "c")), "tensor b is missing"),
        (lambda path: write_weights(path.parent, 1, names=("a", "b", "c")), "tensor c was not published"),
        (lambda path: path.write_bytes(b"\x10\0\0\0\0\0\0\0not json at all!"), "header can't be read"),
    ],
)
async def test_files_that_are_not_what_was_published_never_touch_the_engine(
    broadcast: Broadcast, damage, text: str
) -> None:
    assert await broadcast.receiver.load(await broadcast.publish(1))
    published = await broadcast.publish(2)
    damage(Path(published.directory) / FILE_NAME)
    assert not await broadcast.receiver.load(published)
    assert broadcast.loads == [1]
    assert broadcast.engine.version == 1
    assert text in broadcast.metrics.labels["weights_error"]
    assert await broadcast.receiver.load(await broadcast.publish(3))
    assert "weights_error" not in broadcast.metrics.labels


async def test_the_store_keeps_the_newest_versions_only(broadcast: Broadcast) -> None:
    published = [await broadcast.publish(version) for version in range(1, 6)]
    kept = []
    for one in published:
        assert one.parts is not None
        try:
            await broadcast.payloads.get(one.parts)
        except PayloadGoneError:
            continue
        kept.append(one.version)
    assert kept == [4, 5]


async def test_a_version_that_a_reader_fetches_stays_in_the_store(broadcast: Broadcast, tmp_path: Path) -> None:
    first = await broadcast.publish(1)
    broadcast.held.add((1, 1))
    for version in range(2, 6):
        await broadcast.publish(version)
    elsewhere = msgspec.structs.replace(first, directory=str(tmp_path / "another-node"))
    assert await broadcast.receiver.load(elsewhere)
    broadcast.held.clear()
    await broadcast.publish(6)
    assert first.parts is not None
    with pytest.raises(PayloadGoneError):
        await broadcast.payloads.get(first.parts)


async def test_a_step_whose_folder_is_gone_is_refused_by_name(broadcast: Broadcast) -> None:
    trained = StepTrained(step=9, generation=1, digest="", manifest_id="")
    with pytest.raises(RefusedError, match="step 9 are no longer in"):
        await broadcast_weights(trained, payloads=broadcast.payloads, shelf=None, weights_dir=broadcast.dir)


async def test_a_version_that_was_overtaken_while_broadcast_was_away_is_passed_over(broadcast: Broadcast) -> None:
    write_weights(version_folder(broadcast.dir, 10, 1), seed=10)
    overtaken = StepTrained(step=9, generation=1, digest="", manifest_id="")
    assert not await broadcast_weights(overtaken, payloads=broadcast.payloads, shelf=None, weights_dir=broadcast.dir)


async def test_a_later_generation_of_the_same_version_supersedes_it(broadcast: Broadcast) -> None:
    first, again, other = await broadcast.publish(2, generation=1), await broadcast.publish(2, generation=2), None
    assert supersedes(again, first)
    assert not supersedes(first, again)
    assert await broadcast.receiver.load(first)
    assert await broadcast.receiver.load(again)
    assert broadcast.loads == [2], "equal weights of one version are not loaded twice"
    other = await broadcast.publish(2, seed=99, generation=3)
    assert await broadcast.receiver.load(other)
    assert broadcast.loads == [2, 2]


def test_a_file_is_compared_with_itself_without_complaint(tmp_path: Path) -> None:
    manifest = read_manifest(write_weights(tmp_path, 1))
    check_against(manifest, manifest, "here")
    with pytest.raises(WeightsRefusedError, match="expected a safetensors file"):
        read_manifest(tmp_path / "nothing")


async def test_a_superseded_trainers_step_is_neither_published_nor_takes_anything_from_the_store(
    broadcast: Broadcast,
) -> None:
    heard = Generations()
    stored = {version: await broadcast.publish(version, generation=2) for version in (1, 2, 3)}
    for published in stored.values():
        heard.admits(published.generation)
    write_weights(version_folder(broadcast.dir, 4, 1), 4)
    late = StepTrained(step=4, generation=1, digest="", manifest_id="")
    found = await broadcast_weights(
        late, payloads=broadcast.payloads, shelf=broadcast.shelf, weights_dir=broadcast.dir, generations=heard
    )
    assert found == []
    for version in (2, 3):
        assert await broadcast.payloads.get(stored[version].parts)


async def test_weights_of_a_superseded_trainer_are_never_loaded(broadcast: Broadcast) -> None:
    before = await broadcast.publish(3, generation=1)
    fork = await broadcast.publish(3, seed=30, generation=2)
    late = await broadcast.publish(4, seed=40, generation=1)
    after = await broadcast.publish(4, seed=41, generation=2)
    found = []
    for published in (before, fork, late, after):
        broadcast.receiver.offer(published)
        assert await broadcast.receiver.load(broadcast.receiver.wanted)
        found.append((broadcast.receiver.wanted.version, broadcast.receiver.wanted.generation))
    assert found == [(3, 1), (3, 2), (3, 2), (4, 2)]
    assert [(loaded.version, loaded.generation) for loaded in broadcast.said] == [(3, 1), (3, 2), (4, 2)]
    assert not_superseded([before, fork, late, after]) == [before, fork, after]
