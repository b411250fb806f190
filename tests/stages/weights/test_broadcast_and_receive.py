from __future__ import annotations

import json
import struct
from pathlib import Path

import msgspec
import numpy as np
import pytest

from broker.memory import MemoryBroker, MemoryServer
from pipeline.errors import RefusedError
from pipeline.log import RunPayloads
from pipeline.metrics import Metrics
from schemas.messages.training import StepTrained, WeightsLoaded, WeightsManifest, WeightsPublished
from stages.engine.scripted import ScriptedEngine
from stages.ports import SwapMode, WeightsRefusedError
from stages.weight_files.folders import prune, version_folder
from stages.weight_files.safetensors_file import FILE_NAME, check_against, read_manifest, weights_digest
from stages.weights.broadcast import broadcast_weights
from stages.weights.receive import Receiver, supersedes


def write_weights(
    folder: str | Path, seed: int, *, shape: tuple[int, int] = (4, 3), names: tuple[str, ...] = ("a", "b")
) -> Path:
    random = np.random.default_rng(seed)
    header: dict[str, object] = {}
    data = b""
    for name in names:
        tensor = random.normal(size=shape).astype(np.float32).tobytes()
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [len(data), len(data) + len(tensor)]}
        data += tensor
    head = json.dumps(header).encode()
    path = Path(folder) / FILE_NAME
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(struct.pack("<Q", len(head)) + head + data)
    return path


class Published:
    """What stands on the log."""

    def __init__(self) -> None:
        self.messages: dict[tuple[int, int], WeightsPublished] = {}

    async def find(self, version: int, generation: int) -> WeightsPublished | None:
        return self.messages.get((version, generation))


class Broadcast:
    def __init__(self, tmp_path: Path) -> None:
        self.dir = str(tmp_path / "weights")
        self.payloads = RunPayloads(MemoryBroker(MemoryServer(), "demo"))
        self.published = Published()
        self.said: list[WeightsLoaded] = []
        self.metrics = Metrics("demo", "gateway")
        self.engine = ScriptedEngine(lambda _prompt, _number: [258])
        self.receiver = self.new_receiver(tmp_path)

    def new_receiver(self, tmp_path: Path) -> Receiver:
        async def say(loaded: WeightsLoaded) -> None:
            self.said.append(loaded)

        return Receiver(
            self.engine,
            self.payloads,
            cache_dir=str(tmp_path / "cache"),
            mode=SwapMode.RECOMPUTE,
            incarnation="i",
            say=say,
            metrics=self.metrics,
        )

    async def publish(self, version: int, *, seed: int | None = None, generation: int = 1) -> WeightsPublished:
        write_weights(version_folder(self.dir, version, generation), version if seed is None else seed)
        trained = StepTrained(step=version, generation=generation, digest="", manifest_id="")
        (published,) = await broadcast_weights(
            trained,
            payloads=self.payloads,
            published=self.published,
            weights_dir=self.dir,
            through_store=True,
            keep_versions=2,
        )
        self.published.messages[version, generation] = published
        return published

    @property
    def loads(self) -> list[int]:
        return [version for _, version, _ in self.engine.loads]


@pytest.fixture
def broadcast(tmp_path: Path) -> Broadcast:
    return Broadcast(tmp_path)


async def test_a_version_is_published_with_the_checksum_of_every_tensor(broadcast: Broadcast) -> None:
    published = await broadcast.publish(1)
    manifest = msgspec.msgpack.decode(await broadcast.payloads.get(published.manifest), type=WeightsManifest)
    assert [tensor.name for tensor in manifest.tensors] == ["a", "b"]
    assert manifest.tensors[1].offset == manifest.tensors[0].size_bytes == 48
    assert published.digest == weights_digest(manifest)
    assert published.file is not None
    assert bytes(await broadcast.payloads.get(published.file)) == (Path(published.directory) / FILE_NAME).read_bytes()


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


# prime-rl#1857: a reader that is far behind finds its version collected, goes straight to the newest, and nothing dies
async def test_a_reader_far_behind_goes_on_to_the_newest(broadcast: Broadcast) -> None:
    first = await broadcast.publish(1)
    for version in range(2, 6):
        newest = await broadcast.publish(version)
    prune(broadcast.dir, keep_from_version=4)
    assert not await broadcast.receiver.load(first)
    assert (
        "not held" in broadcast.metrics.labels["weights_error"]
        or "payload" in broadcast.metrics.labels["weights_error"]
    )
    assert await broadcast.receiver.load(newest)
    assert broadcast.loads == [5]


async def test_the_store_keeps_the_newest_versions_only(broadcast: Broadcast) -> None:
    published = [await broadcast.publish(version) for version in range(1, 6)]
    kept = []
    for one in published:
        assert one.file is not None
        try:
            await broadcast.payloads.get(one.file)
        except Exception:  # noqa: BLE001, S112 - any way of being gone
            continue
        kept.append(one.version)
    assert kept == [4, 5]


async def test_a_step_whose_folder_is_gone_is_refused_by_name(broadcast: Broadcast) -> None:
    trained = StepTrained(step=9, generation=1, digest="", manifest_id="")
    with pytest.raises(RefusedError, match="step 9 are no longer in"):
        await broadcast_weights(
            trained,
            payloads=broadcast.payloads,
            published=broadcast.published,
            weights_dir=broadcast.dir,
            through_store=False,
            keep_versions=2,
        )


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
