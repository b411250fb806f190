"""A fold on a live log beside a loop that only reads it: what decoding, folding, publishing and checkpoints cost.

The assembly fold reads groups and trajectories, closes the groups and assembles steps; its outputs are published, confirmed and
checkpointed. Read and folded again from the start, every output stands already.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from typing import Final

import anyio

from broker.api import Broker
from broker.connect import connect
from broker.embedded import EmbeddedServer
from broker.topology import RunLimits
from ops.bench.result import BenchResult, machine
from pipeline.fold import FoldRunner
from pipeline.metrics import Metrics
from schemas.ids import group_id
from schemas.messages.rollout import EpisodeClass, Row, Trajectory
from schemas.messages.sampling import GroupIssued
from schemas.payload import run_ref
from schemas.topics import GROUP_ISSUED, TRAJECTORY_READY
from stages.assembly.fold import AssemblyFold
from stages.assembly.settings import AssemblySettings

RUN: Final = "bench"
ROUNDS: Final = 3
GROUPS: Final = 1000
SLOTS: Final = 8
GROUPS_PER_STEP: Final = 16


def run() -> BenchResult:
    """Messages per second; ratios are medians over rounds that alternate."""
    return anyio.run(_run, backend_options={"use_uvloop": True})


async def _run() -> BenchResult:
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as folder:
        server = EmbeddedServer(folder)
        await server.start()
        try:
            limits = RunLimits(log_max_bytes=4 * 2**30)
            async with connect(server.url, RUN, server.connect_settings(), create=True, limits=limits) as broker:
                end = await _fill(broker)
                first = end / await _fold(broker, end)
                again: list[float] = []
                read: list[float] = []
                for _ in range(ROUNDS):
                    read.append(end / await _read(broker, end))
                    await broker.delete_state("fold.assembly")
                    again.append(end / await _fold(broker, end))
        finally:
            await server.stop()
    return BenchResult(
        name="fold",
        metrics={"fold_per_s": round(first, 1), "fold_again_per_s": round(statistics.median(again), 1)},
        reference={"fold_again_per_s": round(statistics.median(read), 1)},
        ratio={"fold_again_per_s": round(statistics.median(a / r for a, r in zip(again, read, strict=True)), 3)},
        machine=machine(),
    )


def _filters() -> list[str]:
    return [topic.filter(RUN) for topic in (GROUP_ISSUED, TRAJECTORY_READY)]


async def _fill(broker: Broker) -> int:
    """Put groups and their trajectories on the log; its last sequence."""
    limiter = anyio.CapacityLimiter(256)

    async def publish(subject: str, data: bytes) -> None:
        async with limiter:
            await broker.publish(subject, data)

    for start in range(0, GROUPS, 50):
        numbers = range(start, min(GROUPS, start + 50))
        async with anyio.create_task_group() as tasks:
            for number in numbers:
                issued = GroupIssued(group=group_id(number), ordinal=number, stream="s", data_id="d", num_slots=SLOTS)
                tasks.start_soon(publish, GROUP_ISSUED.subject(RUN, issued), GROUP_ISSUED.encode(issued))
        async with anyio.create_task_group() as tasks:
            for number in numbers:
                for slot in range(SLOTS):
                    ended = _trajectory(group_id(number), slot)
                    tasks.start_soon(publish, TRAJECTORY_READY.subject(RUN, ended), TRAJECTORY_READY.encode(ended))
    return (await broker.log_status()).last_sequence


def _trajectory(group: str, slot: int) -> Trajectory:
    row = Row(
        row=f"{group}-{slot}-0",
        tokens=run_ref(f"{group}-{slot}".encode()),  # never fetched: assembly reads no tokens
        num_tokens=100,
        num_loss_tokens=50,
        min_version=0,
        max_version=0,
        reward=float(slot % 2),
    )
    return Trajectory(
        group=group,
        slot=slot,
        attempt=0,
        session="s",
        stream="s",
        data_id="d",
        outcome=EpisodeClass.SCORED,
        rejected=False,
        rows=[row],
        reward=row.reward,
    )


async def _fold(broker: Broker, end: int) -> float:
    """Seconds until everything up to `end` is folded and its outputs stand."""
    settings = AssemblySettings(run=RUN, groups_per_step=GROUPS_PER_STEP, slots_per_group=SLOTS, temperature=1.0)
    runner = FoldRunner(AssemblyFold(settings), broker, Metrics(RUN, "assembly"))
    seconds = 0.0
    async with anyio.create_task_group() as tasks:
        started = time.perf_counter()
        tasks.start_soon(runner.run)
        while runner.sequence < end:
            await anyio.sleep(0.001)
        seconds = time.perf_counter() - started
        runner.drain()
    return seconds


async def _read(broker: Broker, end: int) -> float:
    """Seconds to read the same messages and do nothing with them."""
    started = time.perf_counter()
    async with broker.read(_filters()) as records:
        async for record in records:
            if record.sequence >= end:
                break
    return time.perf_counter() - started
