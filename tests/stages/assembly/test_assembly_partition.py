"""Bins, micro-batches and ranks."""

import random

import pytest

from stages.assembly.balance import balanced_kk, balanced_lpt, bin_sums, contiguous, karmarkar_karp
from stages.assembly.packing import first_fit_decreasing, kk_pack, light_ends, spread_out
from stages.assembly.partition import PartitionSettings, partition, separate_siblings


def rows_of(plan, rank, mini=0):
    return [row for micro in plan.ranks[rank][mini] for row in micro]


def test_differencing_finds_the_even_split():
    assert sorted(bin_sums([8, 7, 6, 5, 4], karmarkar_karp([8, 7, 6, 5, 4], 2))) == [14, 16]


@pytest.mark.parametrize("deal", [balanced_kk, balanced_lpt])
@pytest.mark.parametrize(("items", "bins"), [(0, 3), (2, 3), (7, 3), (9, 3)])
def test_every_bin_gets_as_many(deal, items, bins):
    sizes = [len(members) for members in deal(list(range(1, items + 1)), bins)]
    assert sum(sizes) == items
    assert max(sizes) - min(sizes) <= 1


def test_contiguous_ranges_have_the_least_difference_there_is():
    generator = random.Random(1)
    for _ in range(40):
        costs = [generator.randint(1, 30) for _ in range(7)]
        cuts = [(a, b) for a in range(1, 6) for b in range(a + 1, 7)]
        spreads = [max(s) - min(s) for a, b in cuts for s in [[sum(costs[:a]), sum(costs[a:b]), sum(costs[b:])]]]
        sums = [sum(costs[start:end]) for start, end in contiguous(costs, 3)]
        assert max(sums) - min(sums) == min(spreads)


def test_more_ranges_than_items_are_refused():
    with pytest.raises(ValueError, match="at least as many items"):
        contiguous([1, 2], 3)


def test_packing_falls_back_where_an_even_split_would_overflow():
    bins = kk_pack([7, 7, 7, 3], 12)
    assert max(bin_sums([7, 7, 7, 3], bins)) <= 12
    assert len(bins) == 3


def test_the_number_of_bins_can_be_a_multiple():
    assert len(first_fit_decreasing([5] * 10, 10, multiple=4)) == 8
    with pytest.raises(ValueError, match="can't fill"):
        first_fit_decreasing([5, 5], 10, multiple=4)


def test_light_bins_stand_at_the_ends():
    costs = [1, 5, 3, 4]
    assert [costs[bin_[0]] for bin_ in light_ends(costs, [[0], [1], [2], [3]])] == [3, 5, 4, 1]


def test_bins_are_split_before_empty_ones_are_added():
    assert sorted(map(sorted, spread_out([4, 3, 2], [[0, 1, 2]], 2))) == [[0], [1, 2]]
    found = spread_out([4, 3, 2], [[0, 1, 2]], 5)
    assert sorted(map(len, found)) == [0, 0, 1, 1, 1]


def test_siblings_part_where_lengths_allow():
    costs, groups = [10, 10, 10, 10], [0, 0, 1, 1]
    bins = separate_siblings([[0, 1], [2, 3]], costs, groups)
    assert [sorted(groups[item] for item in members) for members in bins] == [[0, 1], [0, 1]]


def test_siblings_stay_where_parting_would_unbalance():
    assert separate_siblings([[0, 1], [2, 3]], [10, 10, 1, 19], [0, 0, 1, 1]) == [[0, 1], [2, 3]]


def test_more_siblings_than_ranks_share_evenly():
    plan = partition([10] * 8, [0] * 8, [0] * 4 + [1] * 4, 2, PartitionSettings(max_tokens_per_microbatch=100))
    assert [sorted(row // 4 for row in rows_of(plan, rank)) for rank in range(2)] == [[0, 0, 1, 1]] * 2


def test_the_rank_that_had_least_gets_the_heaviest_next():
    lengths, minis = [90, 10, 80, 20], [0, 0, 1, 1]
    plan = partition(lengths, minis, range(4), 2, PartitionSettings(max_tokens_per_microbatch=100))
    assert sorted(sum(lengths[row] for mini in range(2) for row in rows_of(plan, rank, mini)) for rank in range(2)) == [
        90,
        110,
    ]


def test_padding_to_a_multiple_counts_against_the_budget():
    plan = partition([9, 9], [0, 0], [0, 1], 1, PartitionSettings(max_tokens_per_microbatch=24, tokens_multiple=16))
    assert [len(micro) for micro in plan.ranks[0][0]] == [1, 1]


def test_a_mini_batch_without_rows_is_one_empty_micro_batch_on_every_rank():
    plan = partition([5], [0], [0], 2, PartitionSettings(max_tokens_per_microbatch=8), skip=[True])
    assert plan.ranks == [[[[]]], [[[]]]]


def test_no_ranks_and_no_budget_are_refused():
    with pytest.raises(ValueError, match="at least one rank"):
        partition([1], [0], [0], 0, PartitionSettings(max_tokens_per_microbatch=8))
    with pytest.raises(ValueError, match="max_tokens_per_microbatch"):
        partition([1], [0], [0], 1, PartitionSettings(max_tokens_per_microbatch=0))


def test_many_long_rows_over_many_ranks_are_even():
    generator = random.Random(0)
    lengths = [generator.randint(1000, 128_000) for _ in range(4096)]
    plan = partition(
        lengths,
        [0] * 4096,
        [row // 8 for row in range(4096)],
        128,
        PartitionSettings(max_tokens_per_microbatch=131_072),
    )
    sums = [sum(lengths[row] for row in rows_of(plan, rank)) for rank in range(128)]
    assert max(sums) / (sum(sums) / 128) <= 1.02
    kin = [[row // 8 for row in rows_of(plan, rank)] for rank in range(128)]
    assert all(len(set(members)) == len(members) for members in kin)
