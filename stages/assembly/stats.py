"""Figures of a step and of its streams: asked, usable, trained, and how much each group size weighs.

    target, usable, trainable slots      asked for; not rejected; with a row to train (the step's groups)
    pre_filter_*_slot_yield              usable / target, trainable / target: all groups closed since the step before
    fully_masked_group                   of those closed groups: usable, and without a row to train
    singleton_slot_group                 of those closed groups: exactly one usable slot
    usable_group_size                    mean usable slots of the step's groups
    group_loss_weight                    mean share of a group in the sum Σ_i w_i·d_i of its mini-batch
    *_size_N                             the number and the weight of the groups with N usable slots

Sums in the order of ids; the same membership gives the same figures. Knows no advantage formula.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from stages.assembly.batch import Batch
from stages.assembly.filters import trainable, usable
from stages.assembly.settings import AssemblySettings, usable_minimum
from stages.assembly.state import Group, Tally

Stats = dict[str, float]


def tally_closed(tally: Tally, group: Group, reason: str, settings: AssemblySettings) -> None:
    """Count a closed group of a stream, before filters; `reason` is why it was dropped, if it was."""
    num_usable = len(usable(group))
    num_trainable = len(trainable(group, settings))
    tally.closed += 1
    tally.target_slots += group.num_slots
    tally.usable_slots += num_usable
    tally.trainable_slots += num_trainable
    tally.fully_masked_groups += num_usable >= usable_minimum(settings, group.num_slots) and num_trainable == 0
    tally.singleton_groups += num_usable == 1
    for member in group.members.values():
        if member.rejected:
            tally.rejected[member.rejected] = tally.rejected.get(member.rejected, 0) + 1
    if reason:
        tally_dropped(tally, reason)


def tally_dropped(tally: Tally, reason: str) -> None:
    """Count a drop, at closing or later."""
    tally.dropped[reason] = tally.dropped.get(reason, 0) + 1


def step_stats(batch: Batch, tallies: Mapping[str, Tally], step: int, settings: AssemblySettings) -> Stats:
    """Figures of the whole step."""
    stats = _figures(batch, range(len(batch.groups)), step, settings)
    stats.update(_yields(tallies.values()))
    return stats


def stream_stats(batch: Batch, tallies: Mapping[str, Tally], step: int, settings: AssemblySettings) -> dict[str, Stats]:
    """The same figures, per stream; a stream without a group in the step has its counts of closed groups only."""
    found: dict[str, Stats] = {}
    for stream in sorted({group.stream for group in batch.groups} | set(tallies)):
        chosen = [index for index, group in enumerate(batch.groups) if group.stream == stream]
        found[stream] = _figures(batch, chosen, step, settings) if chosen else {"groups": 0.0}
        found[stream].update(_yields([tallies[stream]] if stream in tallies else []))
    return found


def _yields(tallies: Iterable[Tally]) -> Stats:
    counted = list(tallies)
    target = sum(tally.target_slots for tally in counted)
    stats = {
        "closed_groups": float(sum(tally.closed for tally in counted)),
        "fully_masked_group": float(sum(tally.fully_masked_groups for tally in counted)),
        "singleton_slot_group": float(sum(tally.singleton_groups for tally in counted)),
        "pre_filter_usable_slot_yield": sum(tally.usable_slots for tally in counted) / target if target else 0.0,
        "pre_filter_trainable_slot_yield": sum(tally.trainable_slots for tally in counted) / target if target else 0.0,
    }
    for tally in counted:
        for prefix, counts in (("dropped", tally.dropped), ("rejected_slots", tally.rejected)):
            for reason, count in counts.items():
                key = f"{prefix}_{reason}"
                stats[key] = stats.get(key, 0.0) + count
    return {key: stats[key] for key in sorted(stats)}


def _figures(batch: Batch, chosen: Sequence[int], step: int, settings: AssemblySettings) -> Stats:
    members = [usable(batch.groups[index]) for index in chosen]
    sizes = [len(group) for group in members]
    inside = set(chosen)
    rows = [entry for entry in batch.rows if entry.group in inside]
    trained = [entry for entry in rows if entry.num_loss_tokens]
    rewards = [member.reward for group in members for member in group]
    staleness = [step - 1 - entry.row.min_version for entry in trained]
    stats = {
        "groups": float(len(chosen)),
        "rows": float(len(rows)),
        "rows_trained": float(len(trained)),
        "tokens": float(sum(entry.row.num_tokens for entry in rows)),
        "loss_tokens": float(sum(entry.num_loss_tokens for entry in trained)),
        "target_slots": float(sum(batch.groups[index].num_slots for index in chosen)),
        "usable_slots": float(sum(sizes)),
        "trainable_slots": float(sum(len(trainable(batch.groups[index], settings)) for index in chosen)),
        "usable_group_size": sum(sizes) / len(sizes),
        "reward_mean": math.fsum(rewards) / len(rewards),
        "reward_min": min(rewards),
        "reward_max": max(rewards),
        "solved": sum(member.solved for group in members for member in group) / len(rewards),
        "staleness_mean": sum(staleness) / len(staleness),
        "staleness_max": float(max(staleness)),
        "advantage_abs_mean": math.fsum(abs(entry.advantage) for entry in trained) / len(trained),
    }
    stats.update(_loss_weights(batch, chosen, sizes))
    return stats


def _loss_weights(batch: Batch, chosen: Sequence[int], sizes: Sequence[int]) -> Stats:
    """What each group counts in its optimizer step: its part of Σ w·d, which is 1 for the means and free for
    `constant`.
    """
    tokens_R = np.array([entry.num_loss_tokens for entry in batch.rows], dtype=np.float64)
    mini_R = np.array([entry.mini_batch for entry in batch.rows], dtype=np.int64)
    group_R = np.array([entry.group for entry in batch.rows], dtype=np.int64)
    mass_R = batch.loss_weight * tokens_R
    total_M = np.bincount(mini_R, weights=mass_R, minlength=batch.num_mini_batches)
    share_R = mass_R / np.where(total_M > 0.0, total_M, 1.0)[mini_R]
    share_G = np.bincount(group_R, weights=share_R, minlength=len(batch.groups))
    shares = [float(share_G[index]) for index in chosen]
    stats = {"group_loss_weight": math.fsum(shares) / len(shares)}
    for size in sorted(set(sizes)):
        of_size = [share for share, found in zip(shares, sizes, strict=True) if found == size]
        stats[f"n_groups_size_{size}"] = float(len(of_size))
        stats[f"group_loss_weight_size_{size}"] = math.fsum(of_size) / len(of_size)
    return stats
