"""Rows to ranks and micro-batches: a pure function of manifest, ranks and budget that every rank runs itself.

    mini-batch ──KK or LPT──▶ one bin a rank, equal numbers of rows
               ──FFD under the budget──▶ micro-batches, as many on every rank

A rank with fewer gets more, smaller micro-batches, and empty ones when its rows run out: it computes a zero
contribution there and meets the others in every collective. Loss weights are global, so nothing here changes a loss.
Over-long rows are alone or refused. Knows no tensor and no process group.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from enum import StrEnum

import msgspec
import numpy as np
import numpy.typing as npt

from schemas.messages.training import Manifest
from stages.assembly.balance import Bins, balanced_kk, balanced_lpt, bin_sums
from stages.assembly.packing import first_fit_decreasing, kk_pack, light_ends, spread_out

_NEIGHBOURS = 64
"""Rows of nearest length that are tried in a swap of siblings."""
_SLACK = 1.005
"""A swap may raise a rank to this multiple of the mean, or to the heaviest there is."""


class RankBalance(StrEnum):
    """How rows are dealt to ranks."""

    KK = "kk"
    LPT = "lpt"


class MicroBatchPacking(StrEnum):
    """How a rank's rows are packed: as few micro-batches as possible, or as even as possible."""

    FFD = "ffd"
    KK = "kk"


class OverlongRows(StrEnum):
    """What happens to a row above the budget."""

    ALONE = "alone"
    REFUSE = "refuse"


class PartitionSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The budget and the rules of a partition."""

    max_tokens_per_microbatch: int
    balance: RankBalance = RankBalance.KK
    packing: MicroBatchPacking = MicroBatchPacking.FFD
    overlong: OverlongRows = OverlongRows.ALONE
    tokens_multiple: int = 1
    """Every row is padded to a multiple of this many tokens (twice the ranks of a context-parallel group, say)."""
    microbatch_multiple: int = 1
    """Micro-batches of a mini-batch are a multiple of this (pipeline stages)."""
    light_ends: bool = False
    """Heavy micro-batches in the middle instead of first: for pipelines."""


class OverlongRowError(ValueError):
    """A row is longer than a micro-batch may be, and the rule refuses it."""


class Partition(msgspec.Struct, frozen=True, kw_only=True):
    """Who computes what."""

    ranks: list[list[list[list[int]]]]
    """[rank][mini-batch][micro-batch] → row indices of the manifest; an empty micro-batch is a zero contribution."""
    overlong_rows: list[int]
    """Rows above the budget, each alone in its micro-batch: name them in one warning."""

    def micro_batches(self, rank: int) -> list[list[list[int]]]:
        """[mini-batch][micro-batch] → rows, of one rank."""
        return self.ranks[rank]


def partition(
    num_tokens: npt.ArrayLike,
    mini_batch: npt.ArrayLike,
    group: npt.ArrayLike,
    num_ranks: int,
    settings: PartitionSettings,
    *,
    skip: npt.ArrayLike | None = None,
) -> Partition:
    """Deal rows to ranks and micro-batches.

    Args:
        num_tokens: [R] length of each row.
        mini_batch: [R] the optimizer step of each row, from 0.
        group: [R] prompts: siblings go to different ranks where that costs no balance.
        num_ranks: data-parallel ranks.
        settings: budget and rules.
        skip: [R] rows that no rank computes (no loss weight).

    Raises:
        OverlongRowError: a row above the budget where the rule refuses it.
        ValueError: no ranks or no budget.
    """
    _check(num_ranks, settings)
    multiple = settings.tokens_multiple
    padded_R = -(-np.asarray(num_tokens, dtype=np.int64) // multiple) * multiple
    mini_R, group_R = np.asarray(mini_batch, dtype=np.int64), np.asarray(group, dtype=np.int64)
    wanted_R = np.ones(padded_R.shape, dtype=np.bool_) if skip is None else ~np.asarray(skip, dtype=np.bool_)
    tokens, groups = padded_R.tolist(), group_R.tolist()
    overlong = np.flatnonzero(wanted_R & (padded_R > settings.max_tokens_per_microbatch)).tolist()
    if overlong and settings.overlong is OverlongRows.REFUSE:
        raise OverlongRowError(
            f"{len(overlong)} rows (the first at index {overlong[0]}, {tokens[overlong[0]]} tokens padded to a multiple of {multiple}) are "
            f"longer than max_tokens_per_microbatch = {settings.max_tokens_per_microbatch}; raise it, or allow them alone"
        )
    ranks: list[list[list[list[int]]]] = [[] for _ in range(num_ranks)]
    load = [0] * num_ranks
    for mini in range(int(mini_R.max()) + 1 if mini_R.size else 0):
        rows: list[int] = np.flatnonzero((mini_R == mini) & wanted_R).tolist()
        dealt = _deal(rows, tokens, groups, load, settings)
        for rank, micro_batches in enumerate(_pack(dealt, tokens, settings)):
            ranks[rank].append(micro_batches)
            load[rank] += sum(tokens[row] for row in dealt[rank])
    return Partition(ranks=ranks, overlong_rows=overlong)


def partition_manifest(manifest: Manifest, num_ranks: int, settings: PartitionSettings) -> Partition:
    """`partition` of a step's manifest; rows without loss weight are left out."""
    return partition(
        manifest.num_tokens.as_numpy(),
        manifest.mini_batch.as_numpy(),
        manifest.row_group.as_numpy(),
        num_ranks,
        settings,
        skip=manifest.loss_weight.as_numpy() == 0.0,
    )


def separate_siblings(bins: Bins, costs: Sequence[int], groups: Sequence[int]) -> Bins:
    """Swap rows of nearly equal cost so that rows of one group share a bin no more than they must; numbers a bin
    stay.
    """
    members = [list(items) for items in bins]
    home = {item: index for index, items in enumerate(members) for item in items}
    present = [Counter(groups[item] for item in items) for items in members]
    sums = bin_sums(costs, members)
    limit = max(max(sums, default=0), int(_SLACK * sum(sums) / max(1, len(sums))))
    unavoidable = {group: -(-count // len(members)) for group, count in Counter(groups[item] for item in home).items()}
    order = sorted(home, key=lambda item: (costs[item], item))
    place = {item: index for index, item in enumerate(order)}

    def fits(item: int, other: int) -> bool:
        here, there = home[item], home[other]
        moved = costs[item] - costs[other]
        return (
            here != there
            and present[there][groups[item]] < unavoidable[groups[item]]
            and present[here][groups[other]] < unavoidable[groups[other]]
            and sums[there] + moved <= limit
            and sums[here] - moved <= limit
        )

    for item in order:
        here = home[item]
        if present[here][groups[item]] <= unavoidable[groups[item]]:
            continue
        near = range(max(0, place[item] - _NEIGHBOURS), min(len(order), place[item] + _NEIGHBOURS + 1))
        for position in sorted(near, key=lambda position: (abs(position - place[item]), position)):
            other = order[position]
            if fits(item, other):
                there = home[other]
                for bin_index, leaving, coming in ((here, item, other), (there, other, item)):
                    members[bin_index][members[bin_index].index(leaving)] = coming
                    present[bin_index][groups[leaving]] -= 1
                    present[bin_index][groups[coming]] += 1
                    sums[bin_index] += costs[coming] - costs[leaving]
                    home[coming] = bin_index
                break
    return members


def _deal(
    rows: list[int], tokens: list[int], groups: list[int], load: list[int], settings: PartitionSettings
) -> list[list[int]]:
    """The rows of each rank; the heaviest bin goes to the rank that has had the least so far."""
    costs, kin = [tokens[row] for row in rows], [groups[row] for row in rows]
    deal = balanced_kk if settings.balance is RankBalance.KK else balanced_lpt
    bins = separate_siblings(deal(costs, len(load)), costs, kin)
    sums = bin_sums(costs, bins)
    heaviest_first = sorted(range(len(bins)), key=lambda index: (-sums[index], -len(bins[index]), index))
    lightest_first = sorted(range(len(load)), key=lambda rank: (load[rank], rank))
    dealt: list[list[int]] = [[] for _ in load]
    for index, rank in zip(heaviest_first, lightest_first, strict=True):
        dealt[rank] = sorted(rows[position] for position in bins[index])
    return dealt


def _pack(dealt: list[list[int]], tokens: list[int], settings: PartitionSettings) -> list[list[list[int]]]:
    """[rank][micro-batch] → rows, the same number of micro-batches on every rank."""
    packed = [_pack_rank(rows, tokens, settings) for rows in dealt]
    most = max(1, *(len(bins) for bins in packed))
    most = -(-most // settings.microbatch_multiple) * settings.microbatch_multiple
    found: list[list[list[int]]] = []
    for bins in packed:
        even = spread_out(tokens, bins, most)
        if settings.light_ends:
            found.append([sorted(rows) for rows in light_ends(tokens, even)])
        else:
            found.append(sorted((sorted(rows) for rows in even), key=lambda rows: -sum(tokens[row] for row in rows)))
    return found


def _pack_rank(rows: list[int], tokens: list[int], settings: PartitionSettings) -> list[list[int]]:
    budget = settings.max_tokens_per_microbatch
    alone = [[row] for row in rows if tokens[row] > budget]
    fitting = [row for row in rows if tokens[row] <= budget]
    if not fitting:
        return alone
    pack = first_fit_decreasing if settings.packing is MicroBatchPacking.FFD else kk_pack
    bins = pack([tokens[row] for row in fitting], budget)
    return alone + [[fitting[position] for position in members] for members in bins]


def _check(num_ranks: int, settings: PartitionSettings) -> None:
    if num_ranks < 1:
        raise ValueError(f"expected at least one rank, found {num_ranks}")
    for name in ("max_tokens_per_microbatch", "tokens_multiple", "microbatch_multiple"):
        value: int = getattr(settings, name)
        if value < 1:
            raise ValueError(f"{name}: expected at least 1, found {value}")
