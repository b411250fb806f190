"""Weight broadcast beside what it can't be faster than: copying the file and loading it.

`directory`: checksums by the broadcast, announcement and checks by the receiver, the built-in engine's load and a probe,
against `shutil.copyfile` and the same engine's load, in turn on the same files.
`store`: every piece into the payload store of an embedded server and out of it into a node's cache, in one process;
then a version in which one tensor of five changed, and one that a cut-off transfer left half done.
Needs torch, for the engine.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import anyio
import anyio.to_thread
import msgspec
import numpy as np
import psutil

from broker.connect import connect
from broker.embedded import EmbeddedServer
from broker.topology import RunLimits
from ops.bench.result import BenchResult, machine
from pipeline.log import RunPayloads
from pipeline.metrics import Metrics
from schemas.messages.training import StepTrained, WeightParts, WeightsLoaded, WeightsPublished
from stages.ports import InferenceEngine, SwapMode
from stages.weight_files.folders import version_folder
from stages.weight_files.safetensors_file import FILE_NAME, read_manifest
from stages.weights.broadcast import broadcast_weights
from stages.weights.node_cache import NodeCache
from stages.weights.receive import Receiver
from stages.weights.shelf import Shelf

RUN: Final = "bench"
ROUNDS: Final = 5


class _NothingBefore:
    async def find(self, version: int, generation: int) -> WeightsPublished | None:  # noqa: ARG002 - the port's arguments
        return None


def run() -> BenchResult:
    """All figures; MB are 10^6 bytes, ratios medians over rounds that alternate."""
    return anyio.run(_run, backend_options={"use_uvloop": True})


async def _run() -> BenchResult:
    import torch  # noqa: PLC0415 - an extra

    torch.set_num_threads(1)
    metrics: dict[str, float | str] = {}
    reference: dict[str, float | str] = {}
    ratio: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as folder:
        root = Path(folder)
        server = EmbeddedServer(root / "nats")
        await server.start()
        try:
            limits = RunLimits(payload_max_bytes=16 * 2**30)
            async with connect(server.url, RUN, server.connect_settings(), create=True, limits=limits) as broker:
                payloads = RunPayloads(broker)
                for label, sizes in _SIZES.items():
                    case = _Case(root / label, payloads)
                    await anyio.to_thread.run_sync(case.make, sizes)
                    found, beside, over = await _directory(case)
                    metrics |= {f"directory_{label}_s": found}
                    reference |= {f"directory_{label}_s": beside}
                    ratio |= {f"directory_{label}_over_copy_and_load": over}
                    metrics |= {f"{name}_{label}": value for name, value in (await _store(case)).items()}
                    shutil.rmtree(root / label)
        finally:
            await server.stop()
    return BenchResult(name="weights", metrics=metrics, reference=reference, ratio=ratio, machine=machine())


_SIZES: Final = {
    "64mb": {"hidden_size": 512, "intermediate_size": 1536, "num_layers": 5, "num_heads": 8, "num_kv_heads": 4},
    "512mb": {"hidden_size": 1024, "intermediate_size": 3072, "num_layers": 10, "num_heads": 16, "num_kv_heads": 8},
}


class _Case:
    """Models of one size and where they lie."""

    def __init__(self, root: Path, payloads: RunPayloads) -> None:
        self.root: Final = root
        self.payloads: Final = payloads
        self.weights: Final = root / "weights"
        self.model: Final = root / "model"
        self.size_bytes = 0

    def make(self, sizes: dict[str, int]) -> None:
        from stages.policy.tiny import PolicySpec, make_policy_folder  # noqa: PLC0415 - needs torch

        make_policy_folder(self.model, PolicySpec(**sizes, head_dim=64, max_context=256))
        self.size_bytes = (self.model / FILE_NAME).stat().st_size

    def version(self, number: int) -> Path:
        """A version's folder: the model with all of its large tensors changed."""
        folder = Path(version_folder(str(self.weights), number, 1))
        shutil.copytree(self.model, folder)
        _change(folder, 1, number)
        return folder

    async def publish(self, number: int, shelf: Shelf | None) -> WeightsPublished:
        trained = StepTrained(step=number, generation=1, digest="", manifest_id="")
        found = await broadcast_weights(trained, payloads=self.payloads, shelf=shelf, weights_dir=str(self.weights))
        (published,) = found
        if not isinstance(published, WeightsPublished):
            raise TypeError(f"expected WeightsPublished, found {type(published).__name__}")
        return published


async def _directory(case: _Case) -> tuple[float, float, float]:
    from stages.engine.builtin import BuiltinEngineSettings, builtin_engine  # noqa: PLC0415 - needs torch

    ours: list[float] = []
    bare: list[float] = []
    async with builtin_engine("bench", case.model, BuiltinEngineSettings(num_slots=1)) as engine:
        receiver = _receiver(case, engine)
        for number in range(1, ROUNDS + 1):
            folder = await anyio.to_thread.run_sync(case.version, number)
            copy = case.root / "copy"
            shutil.copytree(case.model, copy, dirs_exist_ok=True)
            started = time.perf_counter()
            await anyio.to_thread.run_sync(shutil.copyfile, folder / FILE_NAME, copy / FILE_NAME)
            await engine.load_weights(str(copy), number, SwapMode.RECOMPUTE)
            bare.append(time.perf_counter() - started)
            started = time.perf_counter()
            if not await receiver.load(await case.publish(number, None)):
                raise RuntimeError(f"version {number} was not loaded")
            ours.append(time.perf_counter() - started)
            shutil.rmtree(folder)
    over = statistics.median(a / b for a, b in zip(ours, bare, strict=True))
    return round(statistics.median(ours), 4), round(statistics.median(bare), 4), round(over, 3)


def _receiver(case: _Case, engine: InferenceEngine) -> Receiver:
    async def say(_loaded: WeightsLoaded) -> None:
        return

    return Receiver(
        engine,
        case.payloads,
        cache_dir=str(case.root / "cache"),
        mode=SwapMode.RECOMPUTE,
        incarnation="bench",
        say=say,
        metrics=Metrics(RUN, "bench"),
    )


async def _store(case: _Case) -> dict[str, float]:
    shelf = Shelf(case.payloads, _NothingBefore(), keep_versions=2)
    cache = NodeCache(case.root / "node", case.payloads)
    size_mb = case.size_bytes / 1e6
    put: list[float] = []
    got: list[float] = []
    cpu: list[float] = []
    grown: list[int] = []
    for number in range(1, ROUNDS + 1):
        await anyio.to_thread.run_sync(case.version, number)
        cpu_started = time.process_time()
        with _peak_memory() as peak:
            started = time.perf_counter()
            published = await case.publish(number, shelf)
            put.append(time.perf_counter() - started)
            got.append(await _fetch(case, cache, published))
        cpu.append(time.process_time() - cpu_started)
        grown.append(peak.grown_bytes)
    found = {
        "store_put_mb_per_s": size_mb / statistics.median(put),
        "store_get_mb_per_s": size_mb / statistics.median(got),
        "store_put_and_get_mb_per_s": size_mb / statistics.median(a + b for a, b in zip(put, got, strict=True)),
        "store_put_and_get_mb_per_cpu_s": size_mb / statistics.median(cpu),
        "store_memory_growth_mb": max(grown) / 1e6,
    }
    folder = Path(version_folder(str(case.weights), ROUNDS, 1))
    await anyio.to_thread.run_sync(_shift, folder, Path(version_folder(str(case.weights), ROUNDS + 1, 1)))
    started = time.perf_counter()
    published = await case.publish(ROUNDS + 1, shelf)
    seconds = time.perf_counter() - started
    seconds += await _fetch(case, cache, published)
    found["delta_one_in_five_s"] = seconds
    found["delta_one_in_five_sent_mb"] = shelf.sent_bytes / 1e6
    found["delta_one_in_five_fetched_mb"] = cache.last.fetched_bytes / 1e6
    return {name: round(value, 3) for name, value in found.items()}


def _shift(folder: Path, target: Path) -> None:
    """The next version: one of five large tensors changed."""
    folder.rename(target)
    _change(target, 5, 1)


def _change(folder: Path, every: int, number: int) -> None:
    """Add to every so many of the large tensors."""
    manifest = read_manifest(folder / FILE_NAME)
    start = manifest.total_bytes - max(tensor.offset + tensor.size_bytes for tensor in manifest.tensors)
    data = np.memmap(folder / FILE_NAME, dtype=np.uint8, mode="r+")
    for tensor in [tensor for tensor in manifest.tensors if tensor.size_bytes > 2**20][::every]:
        found = data[start + tensor.offset : start + tensor.offset + tensor.size_bytes].view(np.float32)
        found += np.float32(number / 1000)
    data.flush()


async def _fetch(case: _Case, cache: NodeCache, published: WeightsPublished) -> float:
    if published.parts is None:
        raise RuntimeError(f"version {published.version} is not in the store")
    started = time.perf_counter()
    parts = msgspec.msgpack.decode(await case.payloads.get(published.parts), type=WeightParts)
    async with cache.folder(published.version, published.generation, parts):
        return time.perf_counter() - started


class _Peak:
    grown_bytes = 0


@contextmanager
def _peak_memory() -> Generator[_Peak]:
    """How much this process grows while the block runs, sampled every 5 ms."""
    peak, done, process = _Peak(), threading.Event(), psutil.Process()
    before = process.memory_info().rss

    def watch() -> None:
        while not done.wait(0.005):
            peak.grown_bytes = max(peak.grown_bytes, process.memory_info().rss - before)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield peak
    finally:
        done.set()
        thread.join()
