"""Micro-batches under a token budget: first-fit-decreasing, or Karmarkar-Karp over the fewest that can hold it.

Rows have two numbers: tokens, which the budget bounds, and cost, which is balanced (the tokens themselves unless
given). Deterministic. A bin never exceeds the budget; rows that are longer than the budget are the caller's affair
(`partition`). Knows no rank.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from stages.assembly.balance import Bins, bin_sums, karmarkar_karp


def first_fit_decreasing(tokens: Sequence[int], capacity: int, *, min_bins: int = 1, multiple: int = 1) -> Bins:
    """Longest first; each to the fitting bin with the fewest rows, of those the lightest; a new bin where none fits.

    Args:
        tokens: of each row.
        capacity: most tokens of a bin.
        min_bins: open at least so many.
        multiple: the number of bins is a multiple of this.

    Raises:
        ValueError: a row longer than the capacity, or fewer rows than bins.
    """
    wanted = max(min_bins, multiple)
    while True:
        _refuse(tokens, capacity, wanted)
        bins = _first_fit(tokens, capacity, wanted)
        if len(bins) % multiple == 0:
            return bins
        wanted = -(-len(bins) // multiple) * multiple


def kk_pack(
    tokens: Sequence[int],
    capacity: int,
    *,
    min_bins: int = 1,
    multiple: int = 1,
    costs: Sequence[int] | None = None,
) -> Bins:
    """Karmarkar-Karp over the fewest bins that could hold all tokens; first-fit-decreasing where a bin would overflow.

    Raises:
        ValueError: a row longer than the capacity, or fewer rows than bins.
    """
    wanted = max(min_bins, multiple, -(-sum(tokens) // capacity))
    wanted = -(-wanted // multiple) * multiple
    _refuse(tokens, capacity, wanted)
    bins = karmarkar_karp(tokens if costs is None else costs, wanted)
    if max(bin_sums(tokens, bins)) <= capacity and all(bins):
        return bins
    return first_fit_decreasing(tokens, capacity, min_bins=min_bins, multiple=multiple)


def light_ends(costs: Sequence[int], bins: Bins) -> Bins:
    """The same bins, heavy ones in the middle: a pipeline fills and drains on the light ones."""
    sums = bin_sums(costs, bins)
    order = sorted(range(len(bins)), key=lambda index: (-sums[index], index))
    return [bins[index] for index in (*order[0::2][::-1], *order[1::2])]


def spread_out(tokens: Sequence[int], bins: Bins, num_bins: int) -> Bins:
    """Exactly `num_bins` bins: the fullest is halved again and again, and what rows can't fill stays empty."""
    found = [list(members) for members in bins]
    heap = [(-sum(tokens[item] for item in members), index) for index, members in enumerate(found) if len(members) > 1]
    heapq.heapify(heap)
    while len(found) < num_bins and heap:
        _, index = heapq.heappop(heap)
        members = found[index]
        halves = karmarkar_karp([tokens[item] for item in members], 2)
        first, second = ([members[position] for position in half] for half in halves)
        found[index] = first
        found.append(second)
        for half, place in ((first, index), (second, len(found) - 1)):
            if len(half) > 1:
                heapq.heappush(heap, (-sum(tokens[item] for item in half), place))
    return found + [[] for _ in range(num_bins - len(found))]


def _first_fit(tokens: Sequence[int], capacity: int, min_bins: int) -> Bins:
    bins: Bins = []
    # number of rows → bins with so many, as a heap of (tokens, bin): where its lightest has no room, none has.
    by_count: dict[int, list[tuple[int, int]]] = {}
    for item in sorted(range(len(tokens)), key=lambda index: (-tokens[index], index)):
        size = tokens[item]
        weight, chosen = 0, len(bins)
        if len(bins) >= min_bins:
            for count in sorted(by_count):
                if by_count[count][0][0] + size <= capacity:
                    weight, chosen = heapq.heappop(by_count[count])
                    if not by_count[count]:
                        del by_count[count]
                    break
        if chosen == len(bins):
            bins.append([])
        bins[chosen].append(item)
        heapq.heappush(by_count.setdefault(len(bins[chosen]), []), (weight + size, chosen))
    return bins


def _refuse(tokens: Sequence[int], capacity: int, num_bins: int) -> None:
    longest = max(tokens, default=0)
    if longest > capacity:
        raise ValueError(f"a row of {longest} tokens is longer than the budget of {capacity} tokens a micro-batch")
    if len(tokens) < num_bins:
        raise ValueError(f"{len(tokens)} rows can't fill {num_bins} micro-batches that each hold at least one")
