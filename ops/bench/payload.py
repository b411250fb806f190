"""Payloads of 64 MB and 1 MB, put and got, on the broker and as files, beside writing and reading a plain file."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

import anyio
import anyio.to_thread
import numpy as np

from broker.api import PayloadStore
from broker.connect import connect
from broker.directory import DirectoryPayloads
from broker.embedded import EmbeddedServer
from broker.topology import RunLimits
from ops.bench.result import BenchResult, machine
from schemas.payload import PayloadRef

RUN: Final = "bench"
ROUNDS: Final = 5
SIZES: Final = {"64MB": (64 * 2**20, 1), "1MB": (2**20, 64)}
"""Name → bytes of one, and how many one after another."""


def run() -> BenchResult:
    """MB (10⁶ bytes) per second, medians of five rounds with new bytes each."""
    return anyio.run(_run, backend_options={"use_uvloop": True})


async def _run() -> BenchResult:
    metrics: dict[str, float | str] = {}
    reference: dict[str, float | str] = {}
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as folder:
        server = EmbeddedServer(Path(folder) / "nats")
        await server.start()
        try:
            limits = RunLimits(payload_max_bytes=16 * 2**30)
            async with connect(server.url, RUN, server.connect_settings(), create=True, limits=limits) as broker:
                for name, (size, count) in SIZES.items():
                    stores: dict[str, PayloadStore] = {
                        "broker": broker.payloads,
                        "directory": DirectoryPayloads(Path(folder) / "payloads"),
                    }
                    for kind, store in stores.items():
                        put, get = await _rates(store, size, count)
                        metrics[f"{kind}_put_{name}_mb_per_s"], metrics[f"{kind}_get_{name}_mb_per_s"] = put, get
                    write, read = await _plain_rates(Path(folder) / "plain", size, count)
                    for kind in stores:
                        reference[f"{kind}_put_{name}_mb_per_s"], reference[f"{kind}_get_{name}_mb_per_s"] = write, read
        finally:
            await server.stop()
    ratio = {key: round(float(metrics[key]) / float(reference[key]), 3) for key in metrics}
    return BenchResult(name="payload", metrics=metrics, reference=reference, ratio=ratio, machine=machine())


async def _rates(store: PayloadStore, size: int, count: int) -> tuple[float, float]:
    random = np.random.default_rng()
    put_s: list[float] = []
    get_s: list[float] = []
    for _ in range(ROUNDS):
        blobs = [random.bytes(size) for _ in range(count)]
        refs: list[PayloadRef] = []

        async def put(blobs: list[bytes] = blobs, refs: list[PayloadRef] = refs) -> None:
            refs.extend([await store.put(blob) for blob in blobs])

        async def get(refs: list[PayloadRef] = refs) -> None:
            for ref in refs:
                await store.get(ref)

        put_s.append(await _timed(put))
        get_s.append(await _timed(get))
        for ref in refs:
            await store.delete(ref.id)
    return tuple(round(size * count / 1e6 / statistics.median(found), 1) for found in (put_s, get_s))  # pyright: ignore[reportReturnType] - two of them


async def _timed(work: Callable[[], Awaitable[None]]) -> float:
    started = time.perf_counter()
    await work()
    return time.perf_counter() - started


async def _plain_rates(folder: Path, size: int, count: int) -> tuple[float, float]:
    """Of one thread that writes and reads files, without checksums."""
    await anyio.Path(folder).mkdir(exist_ok=True)
    data = np.random.default_rng().bytes(size)

    def write() -> None:
        for number in range(count):
            (folder / str(number)).write_bytes(data)

    def read() -> None:
        for number in range(count):
            (folder / str(number)).read_bytes()

    found: list[float] = []
    for work in (write, read):
        seconds = [await _timed(lambda work=work: anyio.to_thread.run_sync(work)) for _ in range(ROUNDS)]
        found.append(round(size * count / 1e6 / statistics.median(seconds), 1))
    return found[0], found[1]
