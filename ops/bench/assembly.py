"""Benchmark of group assembly: folding, restart, partition, memory, each on one core.

The lengths of the partition case are drawn once from a fixed seed, so that the reference systems' figures below,
which were measured with the same lengths and number of ranks, can stand beside ours. Knows assembly and messages;
needs no broker.
"""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Iterator
from typing import Final

import msgspec
import numpy as np

from ops.bench.result import BenchResult, machine
from schemas.ids import group_id, row_id
from schemas.messages.rollout import EpisodeClass, Row, Trajectory
from schemas.messages.sampling import GroupIssued
from schemas.messages.training import StepTrained
from schemas.payload import PayloadRef
from schemas.topics import GROUP_ISSUED, TRAJECTORY_READY
from stages.assembly.balance import balanced_lpt, bin_sums
from stages.assembly.fold import AssemblyFold
from stages.assembly.partition import PartitionSettings, partition
from stages.assembly.settings import AssemblySettings
from stages.assembly.state import AssemblyState

SLOTS: Final = 8
GROUPS_PER_STEP: Final = 64
NUM_ROWS: Final = 16_384
NUM_RANKS: Final = 512
BUDGET_TOKENS: Final = 131_072

REFERENCES: Final = {
    "areal_balanced_greedy_s": 0.397,
    "areal_balanced_greedy_max_over_mean": 1.00002,
    "areal_kk_s": 15.7,
    "areal_kk_max_over_mean": 1.00001,
    "areal_ffd_min_512_groups_s": 1.31,
    "verl_kk_equal_size_s": 0.054,
    "verl_kk_equal_size_max_over_mean": 1.00001,
    "verl_kk_s": 16.4,
    "verl_greedy_equal_size_s": 0.40,
    "verl_greedy_equal_size_max_over_mean": 1.7213,
}
REFERENCE_SOURCE: Final = (
    "areal-project/AReaL cbff54d6 areal/utils/seqpack.py (balanced_greedy_partition, _kk_partition, ffd_allocate) and "
    "verl-project/verl 1dda039b verl/utils/seqlen_balancing.py (get_seqlen_balanced_partitions, greedy_partition), "
    "run on the lengths of `partition_lengths` over 512 bins, Python 3.11, one core of an Intel Xeon, without numba. "
    "They deal rows to ranks; ours also parts siblings and packs micro-batches"
)


def partition_lengths() -> list[int]:
    """[16384] row lengths of 1 to 128 k tokens, log-uniform: many short rows and a long tail."""
    generator = np.random.default_rng(0)
    return np.exp(generator.uniform(np.log(1_000), np.log(128_000), NUM_ROWS)).astype(int).tolist()


def run() -> BenchResult:
    """All figures."""
    metrics: dict[str, float | str] = {}
    folding, restart, dealt = _folding(), _restart(), _partition()
    for found in (folding, restart, _memory(), dealt):
        metrics.update(found)
    return BenchResult(
        name="assembly",
        metrics=metrics,
        reference={**REFERENCES, "source": REFERENCE_SOURCE},
        ratio={
            "folded_per_s_over_required": folding["folded_trajectories_per_s"] / 3_000,
            "restart_over_allowed": restart["restart_s"] / 2.0,
            "partition_over_allowed": dealt["partition_s"] / 1.0,
            "deal_over_areal_balanced_greedy": dealt["deal_lpt_s"] / REFERENCES["areal_balanced_greedy_s"],
            "partition_over_verl_kk_equal_size": dealt["partition_s"] / REFERENCES["verl_kk_equal_size_s"],
        },
        machine=machine(),
    )


def _issued(ordinal: int) -> GroupIssued:
    return GroupIssued(group=group_id(ordinal), ordinal=ordinal, stream="math", data_id=f"d{ordinal}", num_slots=SLOTS)


def _trajectory(ordinal: int, slot: int) -> Trajectory:
    reward = float((ordinal * 7 + slot * 3) % 5) / 4
    row = Row(
        row=row_id(group_id(ordinal), slot, 0),
        tokens=PayloadRef(store="run", id=f"{ordinal:016x}{slot:016x}", size_bytes=4096),
        num_tokens=900,
        num_loss_tokens=300 + slot,
        min_version=ordinal // GROUPS_PER_STEP,
        max_version=ordinal // GROUPS_PER_STEP,
        reward=reward,
    )
    return Trajectory(
        group=group_id(ordinal),
        slot=slot,
        attempt=0,
        session=f"s{ordinal}-{slot}",
        stream="math",
        data_id=f"d{ordinal}",
        outcome=EpisodeClass.SCORED,
        rejected=False,
        rows=[row],
        score=reward,
        reward=reward,
        solved=reward > 0.5,
        num_interactions=3,
        num_completion_tokens=300,
    )


def _history(first: int, end: int) -> Iterator[msgspec.Struct]:
    """Whole groups, each step trained as soon as it is whole."""
    for ordinal in range(first, end):
        yield _issued(ordinal)
        yield from (_trajectory(ordinal, slot) for slot in range(SLOTS))
        if (ordinal + 1) % GROUPS_PER_STEP == 0:
            yield StepTrained(step=(ordinal + 1) // GROUPS_PER_STEP, generation=1, digest="", manifest_id="")


def _fold() -> AssemblyFold:
    return AssemblyFold(
        AssemblySettings(
            run="bench", groups_per_step=GROUPS_PER_STEP, slots_per_group=SLOTS, mini_batch_groups=16, max_staleness=4
        )
    )


def _folding() -> dict[str, float]:
    """From wire bytes to encoded steps, as a worker sees them."""
    num_groups = 2_500
    wire = [
        (GROUP_ISSUED, GROUP_ISSUED.encode(message))
        if isinstance(message, GroupIssued)
        else (TRAJECTORY_READY, TRAJECTORY_READY.encode(message))
        for message in _history(0, num_groups)
        if isinstance(message, GroupIssued | Trajectory)
    ]
    fold = _fold()
    state = fold.initial()
    start = time.perf_counter()
    for topic, data in wire:
        fold.step(state, topic.decode(data))
    elapsed = time.perf_counter() - start
    return {"folded_trajectories": float(num_groups * SLOTS), "folded_trajectories_per_s": num_groups * SLOTS / elapsed}


def _restart() -> dict[str, float]:
    """A checkpoint after 10,000 finished groups with 200 open ones: read it, and fold on."""
    fold = _fold()
    state = fold.initial()
    for message in _history(0, 10_000):
        fold.step(state, message)
    for ordinal in range(10_000, 10_200):
        fold.step(state, _issued(ordinal))
        for slot in range(SLOTS - 1):
            fold.step(state, _trajectory(ordinal, slot))
    checkpoint = msgspec.msgpack.encode(state)
    start = time.perf_counter()
    restored = msgspec.msgpack.decode(checkpoint, type=AssemblyState)
    outputs = _fold().step(restored, _trajectory(10_000, SLOTS - 1))
    elapsed = time.perf_counter() - start
    if len(restored.open) != 199 or not outputs:
        raise RuntimeError(f"expected 199 open groups and a closed one after the restart, found {len(restored.open)}")
    return {"restart_s": elapsed, "checkpoint_bytes": float(len(checkpoint))}


def _memory() -> dict[str, float]:
    """Traced bytes of the state with 192, 384 and 768 open groups, and its checkpoint after all of them ended in
    whole steps.
    """
    found: dict[str, float] = {}
    for open_groups in (192, 384, 768):
        tracemalloc.start()
        fold = _fold()
        state = fold.initial()
        for ordinal in range(open_groups):
            fold.step(state, _issued(ordinal))
            for slot in range(SLOTS - 1):
                fold.step(state, _trajectory(ordinal, slot))
        found[f"state_bytes_{open_groups}_open"] = float(tracemalloc.get_traced_memory()[0])
        for ordinal in range(open_groups):
            fold.step(state, _trajectory(ordinal, SLOTS - 1))
        found[f"checkpoint_bytes_{open_groups}_ended"] = float(len(msgspec.msgpack.encode(state)))
        tracemalloc.stop()
    found["state_bytes_growth_384_to_768"] = found["state_bytes_768_open"] / found["state_bytes_384_open"]
    return found


def _partition() -> dict[str, float]:
    lengths = partition_lengths()
    groups = [index // SLOTS for index in range(NUM_ROWS)]
    settings = PartitionSettings(max_tokens_per_microbatch=BUDGET_TOKENS)
    start = time.perf_counter()
    plan = partition(lengths, [0] * NUM_ROWS, groups, NUM_RANKS, settings)
    elapsed = time.perf_counter() - start
    sums = [sum(lengths[row] for micro in rank[0] for row in micro) for rank in plan.ranks]
    start = time.perf_counter()
    dealt = balanced_lpt(lengths, NUM_RANKS)
    deal_s = time.perf_counter() - start
    dealt_sums = bin_sums(lengths, dealt)
    return {
        "partition_rows": float(NUM_ROWS),
        "partition_ranks": float(NUM_RANKS),
        "partition_s": elapsed,
        "partition_max_over_mean": max(sums) / (sum(sums) / NUM_RANKS),
        "deal_lpt_s": deal_s,
        "deal_lpt_max_over_mean": max(dealt_sums) / (sum(dealt_sums) / NUM_RANKS),
    }
