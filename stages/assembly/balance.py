"""Splitting costs over a fixed number of bins: Karmarkar-Karp, longest first, contiguous. Deterministic, integers only.

Bins are lists of item indices. `balanced_kk` and `balanced_lpt` give every bin the same number of items (max - min <=
1). Knows no rank and no row.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

Bins = list[list[int]]
_Set = tuple[int, int, tuple[int, ...]]
"""(sum, number of items, items): compares as the differencing method orders sets."""


def bin_sums(costs: Sequence[int], bins: Bins) -> list[int]:
    """The cost of each bin."""
    return [sum(costs[index] for index in members) for members in bins]


def karmarkar_karp(costs: Sequence[int], num_bins: int) -> Bins:
    """Largest differencing (Karmarkar, Karp 1982; Korf 2009): any number of items a bin, none where items are too
    few.
    """
    ascending = sorted(range(len(costs)), key=lambda index: (costs[index], index))
    empty: list[_Set] = [(0, 0, ())] * (num_bins - 1)
    return _difference([[(costs[index], 1, (index,)), *empty] for index in ascending], num_bins)


def balanced_kk(costs: Sequence[int], num_bins: int) -> Bins:
    """Largest differencing over tiers: each bin gets one item of every `num_bins` neighbours in size."""
    ascending = sorted(range(len(costs)), key=lambda index: (costs[index], index))
    # The smallest tier is the short one: the bins that miss out differ by the least.
    short = len(ascending) % num_bins
    tiers = [ascending[:short]] if short else []
    tiers += [ascending[start : start + num_bins] for start in range(short, len(ascending), num_bins)]
    states: list[list[_Set]] = []
    for tier in tiers:
        sets: list[_Set] = [(costs[index], 1, (index,)) for index in tier]
        states.append(sorted(sets + [(0, 0, ())] * (num_bins - len(tier)), reverse=True))
    return _difference(states, num_bins)


def _difference(states: list[list[_Set]], num_bins: int) -> Bins:
    """Merge the two states of widest spread, largest set with smallest, until one is left."""
    if not states:
        return [[] for _ in range(num_bins)]
    heap = [(sets[-1][0] - sets[0][0], _Reversed(sets[0]), order, sets) for order, sets in enumerate(states)]
    heapq.heapify(heap)
    order = len(heap)
    while len(heap) > 1:
        one, other = heapq.heappop(heap)[3], heapq.heappop(heap)[3]
        merged = sorted(
            ((a[0] + b[0], a[1] + b[1], a[2] + b[2]) for a, b in zip(one, reversed(other), strict=True)),
            reverse=True,
        )
        heapq.heappush(heap, (merged[-1][0] - merged[0][0], _Reversed(merged[0]), order, merged))
        order += 1
    return [list(items) for _, _, items in heap[0][3]]


class _Reversed:
    """Orders sets the other way round, so that the heap gives the largest first."""

    __slots__ = ("of",)

    def __init__(self, of: _Set) -> None:
        self.of = of

    def __lt__(self, other: _Reversed) -> bool:
        return self.of > other.of

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Reversed) and self.of == other.of

    def __hash__(self) -> int:
        return hash(self.of)


def balanced_lpt(costs: Sequence[int], num_bins: int) -> Bins:
    """Longest first, each to the lightest bin that still takes one (Graham 1969)."""
    floor, above = divmod(len(costs), num_bins)
    bins: Bins = [[] for _ in range(num_bins)]
    heap = [(0, index) for index in range(num_bins)]
    for item in sorted(range(len(costs)), key=lambda index: (-costs[index], index)):
        weight, chosen = heapq.heappop(heap)
        while len(bins[chosen]) >= floor and (above == 0 or len(bins[chosen]) > floor):
            weight, chosen = heapq.heappop(heap)
        above -= len(bins[chosen]) == floor
        bins[chosen].append(item)
        heapq.heappush(heap, (weight + costs[item], chosen))
    return bins


def contiguous(costs: Sequence[int], num_bins: int) -> list[tuple[int, int]]:
    """[start, end) ranges of neighbours, none empty, with the least difference between the heaviest and the lightest.

    Exact: every prefix keeps all (heaviest, lightest) pairs that no other beats in both. For short lists: the time
    grows with n² · bins.

    Raises:
        ValueError: fewer items than bins.
    """
    if not 1 <= num_bins <= len(costs):
        raise ValueError(f"{num_bins} non-empty ranges need at least as many items: found {len(costs)}")
    prefix = [0]
    for cost in costs:
        prefix.append(prefix[-1] + cost)
    # reach[end]: pairs (heaviest, lightest, start of the last range, position in the former column)
    column: list[list[tuple[int, int, int, int]]] = [[(total, total, 0, 0)] for total in prefix]
    columns = [column]
    for used in range(2, num_bins + 1):
        former, column = column, [[] for _ in prefix]
        for end in range(used, len(prefix)):
            found = [
                (max(high, prefix[end] - prefix[start]), min(low, prefix[end] - prefix[start]), start, position)
                for start in range(used - 1, end)
                for position, (high, low, _, _) in enumerate(former[start])
            ]
            column[end] = _undominated(found)
        columns.append(column)
    return _trace(columns, len(costs))


def _undominated(found: list[tuple[int, int, int, int]]) -> list[tuple[int, int, int, int]]:
    kept: list[tuple[int, int, int, int]] = []
    for pair in sorted(found, key=lambda pair: (pair[0], -pair[1], pair[2])):
        if not kept or pair[1] > kept[-1][1]:
            kept.append(pair)
    return kept


def _trace(columns: list[list[list[tuple[int, int, int, int]]]], end: int) -> list[tuple[int, int]]:
    last = columns[-1][end]
    position = min(range(len(last)), key=lambda index: (last[index][0] - last[index][1], last[index][0]))
    ranges: list[tuple[int, int]] = []
    for column in reversed(columns):
        _, _, start, former = column[end][position]
        ranges.append((start, end))
        end, position = start, former
    return ranges[::-1]
