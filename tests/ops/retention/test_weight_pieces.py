"""Pieces of weights are needed for as long as the newest version is made of them, however long ago they were stored."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import anyio
import msgspec
import numpy as np

from broker.memory import MemoryBroker, MemoryServer
from ops.retention.follow import LogFollower
from ops.retention.ledger import Ledger
from pipeline.log import RunLog, RunPayloads
from schemas.messages.training import StepTrained, WeightParts, WeightsPublished
from stages.weight_files.folders import version_folder
from stages.weights.broadcast import broadcast_weights
from stages.weights.shelf import Shelf

SIZE = 600_000
"""Bytes of a tensor: large enough for a piece of its own."""


def write(folder: Path, *fills: int) -> None:
    """A safetensors file with a tensor of bytes for each number."""
    header = {
        f"t{place}": {"dtype": "U8", "shape": [SIZE], "data_offsets": [place * SIZE, (place + 1) * SIZE]}
        for place in range(len(fills))
    }
    head = json.dumps(header).encode()
    folder.mkdir(parents=True)
    data = b"".join(np.full(SIZE, fill, np.uint8).tobytes() for fill in fills)
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(head)) + head + data)


class Published:
    def __init__(self, log: RunLog) -> None:
        self.log = log
        self.found: dict[tuple[int, int], WeightsPublished] = {}

    async def find(self, version: int, generation: int) -> WeightsPublished | None:
        return self.found.get((version, generation))


async def test_a_piece_that_the_newest_weights_share_with_old_ones_is_still_named(tmp_path: Path, wait_until) -> None:
    broker = MemoryBroker(MemoryServer(), "r")
    payloads, log = RunPayloads(broker), RunLog(broker)
    published = Published(log)
    shelf = Shelf(payloads, published, keep_versions=1)
    parts: list[set[str]] = []
    for version, fills in ((1, (1, 2)), (2, (1, 3)), (3, (1, 4))):
        write(Path(version_folder(str(tmp_path), version, 1)), *fills)
        trained = StepTrained(step=version, generation=1, digest="", manifest_id="")
        (one,) = await broadcast_weights(trained, payloads=payloads, shelf=shelf, weights_dir=str(tmp_path))
        published.found[version, 1] = await log.publish(one)
        index = msgspec.msgpack.decode(await payloads.get(one.parts), type=WeightParts)
        parts.append({part.id for file in index.files for part in file.parts})
    follower = LogFollower(broker, await Ledger.restore(broker), trains=True)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(follower.run)
        await wait_until(follower.caught_up.is_set)
        tasks.cancel_scope.cancel()
    mark, weights = 100, follower.needs.kept_weights
    assert all(follower.uses.is_named(piece, mark, weights) for piece in parts[2])
    assert parts[0] & parts[2], "the tensor that never changed"
    assert not any(follower.uses.is_named(piece, mark, weights) for piece in (parts[0] | parts[1]) - parts[2])
