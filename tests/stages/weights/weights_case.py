"""A run's weights for tests: files, a broadcast, an engine that receives them."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np

from broker.memory import MemoryBroker, MemoryServer
from pipeline.log import RunPayloads
from pipeline.metrics import Metrics
from schemas.messages.training import StepTrained, WeightsLoaded, WeightsPublished
from stages.engine.scripted import ScriptedEngine
from stages.ports import SwapMode
from stages.weight_files.folders import version_folder
from stages.weight_files.safetensors_file import FILE_NAME
from stages.weights.broadcast import broadcast_weights
from stages.weights.receive import Receiver, ReceiverSettings
from stages.weights.shelf import Shelf


def write_weights(
    folder: str | Path,
    seed: int,
    *,
    shape: tuple[int, int] = (4, 3),
    names: tuple[str, ...] = ("a", "b"),
    same: tuple[str, ...] = (),
) -> Path:
    """A safetensors file and a config beside it; the tensors in `same` do not depend on the seed."""
    header: dict[str, object] = {}
    data = b""
    for number, name in enumerate(names):
        random = np.random.default_rng([number, 0 if name in same else seed])
        tensor = random.normal(size=shape).astype(np.float32).tobytes()
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [len(data), len(data) + len(tensor)]}
        data += tensor
    head = json.dumps(header).encode()
    path = Path(folder) / FILE_NAME
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(struct.pack("<Q", len(head)) + head + data)
    (path.parent / "config.json").write_text('{"model_type": "qwen3"}')
    return path


class Published:
    """What stands on the log."""

    def __init__(self) -> None:
        self.messages: dict[tuple[int, int], WeightsPublished] = {}

    async def find(self, version: int, generation: int) -> WeightsPublished | None:
        return self.messages.get((version, generation))


class Broadcast:
    """A trainer's folders, their broadcast, and one engine with its receiver."""

    def __init__(self, tmp_path: Path) -> None:
        self.tmp_path = tmp_path
        self.dir = str(tmp_path / "weights")
        self.payloads = RunPayloads(MemoryBroker(MemoryServer(), "demo"))
        self.published = Published()
        self.held: set[tuple[int, int]] = set()
        self.shelf = Shelf(self.payloads, self.published, keep_versions=2, held=lambda: self.held)
        self.said: list[WeightsLoaded] = []
        self.states: list[tuple[str, str]] = []
        self.metrics = Metrics("demo", "gateway")
        self.engine = ScriptedEngine(lambda _prompt, _number: [258], keep_calls=True)
        self.now_s = 1000.0
        self.receiver = self.new_receiver()

    def new_receiver(
        self, engine=None, *, payloads=None, incarnation: str = "i", on_state=None, **settings
    ) -> Receiver:
        async def say(loaded: WeightsLoaded) -> None:
            self.said.append(loaded)

        return Receiver(
            engine or self.engine,
            payloads or self.payloads,
            cache_dir=str(self.tmp_path / "cache"),
            mode=SwapMode.RECOMPUTE,
            incarnation=incarnation,
            say=say,
            metrics=self.metrics,
            settings=ReceiverSettings(**settings),
            on_state=on_state or (lambda state, reason: self.states.append((state.value, reason))),
            now=lambda: self.now_s,
        )

    async def publish(
        self, version: int, *, seed: int | None = None, generation: int = 1, **content
    ) -> WeightsPublished:
        folder = version_folder(self.dir, version, generation)
        write_weights(folder, version if seed is None else seed, **content)
        return await self.announce(version, generation)

    async def announce(self, version: int, generation: int = 1) -> WeightsPublished:
        """Publish what lies in a version's folder."""
        trained = StepTrained(step=version, generation=generation, digest="", manifest_id="")
        (published,) = await broadcast_weights(trained, payloads=self.payloads, shelf=self.shelf, weights_dir=self.dir)
        self.published.messages[version, generation] = published
        return published

    @property
    def loads(self) -> list[int]:
        return [version for _, version, _ in self.engine.loads]
