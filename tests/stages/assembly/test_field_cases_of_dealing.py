"""Reported faults of the field in packing, redistribution and the weights of losses: never here."""

import math
import random
from itertools import chain

import numpy as np
import pytest
import torch

from stages.assembly.balance import balanced_kk, bin_sums
from stages.assembly.packing import first_fit_decreasing
from stages.assembly.partition import OverlongRowError, OverlongRows, PartitionSettings, partition
from stages.assembly.weights import Aggregation, row_weights
from stages.learning.packing import cu_seqlens, next_token_labels, pad_pack, position_ids


def test_prime_rl_1525_positions_and_borders_of_packed_rows():
    borders = cu_seqlens([3, 2, 4])
    assert borders.tolist() == [0, 3, 5, 9]
    assert position_ids(borders).tolist() == [0, 1, 2, 0, 1, 0, 1, 2, 3]


def test_prime_rl_1525_only_labels_are_shifted_and_never_across_a_border():
    labels = next_token_labels(torch.arange(9), cu_seqlens([3, 2, 4]))
    assert labels.tolist() == [1, 2, -100, 4, -100, 6, 7, 8, -100]


def test_prime_rl_1525_padding_is_a_segment_of_its_own():
    assert pad_pack(cu_seqlens([3, 2, 4]), 12).tolist() == [0, 3, 5, 9, 12]


# Verl 6735: the budget bounds tokens


def test_verl_6735_no_micro_batch_goes_over_the_cap():
    lengths = [70, 30, 30, 30, 30, 10]
    bins = first_fit_decreasing(lengths, 100)
    assert max(bin_sums(lengths, bins)) <= 100
    assert len(bins) in (2, 3)
    assert sorted(chain(*bins)) == list(range(6))


def test_verl_6735_an_over_long_row_is_alone_and_named_once():
    found = partition([150, 20, 30], [0, 0, 0], [0, 1, 2], 1, PartitionSettings(max_tokens_per_microbatch=100))
    assert sorted(found.ranks[0][0]) == [[0], [1, 2]]
    assert found.overlong_rows == [0]


def test_verl_6735_or_it_is_refused_with_its_size():
    rule = PartitionSettings(max_tokens_per_microbatch=100, overlong=OverlongRows.REFUSE)
    with pytest.raises(OverlongRowError, match="150 tokens"):
        partition([150, 20, 30], [0, 0, 0], [0, 1, 2], 1, rule)


def total_loss(losses, groups, mode, divisor=None):
    """Σ w_i Σ ℓ_it of rows given as lists of trained tokens' losses."""
    weights = row_weights([len(tokens) for tokens in losses], groups, mode, divisor)
    return math.fsum(weight * token for weight, tokens in zip(weights, losses, strict=True) for token in tokens)


# Tunix 1662: loss does not depend on packing

TUNIX_1662_ROWS = ([1, 1], [7], [2, 2])


def test_tunix_1662_every_mode_counts_rows_not_packs():
    assert total_loss(TUNIX_1662_ROWS, [0, 1, 2], Aggregation.TOKEN_MEAN) == pytest.approx(2.6)
    assert total_loss(TUNIX_1662_ROWS, [0, 1, 2], Aggregation.SEQ_MEAN) == pytest.approx(3.333333, abs=1e-6)
    assert total_loss(TUNIX_1662_ROWS, [0, 1, 2], Aggregation.CONSTANT, 1.0) == pytest.approx(4.333333, abs=1e-6)


def test_tunix_1662_empty_filler_rows_are_not_sequences():
    filled = (*TUNIX_1662_ROWS, [], [])
    assert total_loss(filled, range(5), Aggregation.SEQ_MEAN) == pytest.approx(3.333333, abs=1e-6)
    assert total_loss(filled, range(5), Aggregation.CONSTANT, 1.0) == pytest.approx(4.333333, abs=1e-6)


# Verl 6869: any number of rows over any ranks


@pytest.mark.parametrize(
    ("rows", "ranks", "sizes"),
    [(9, 4, [3, 2, 2, 2]), (10, 4, [3, 3, 2, 2]), (3, 4, [1, 1, 1, 0]), (206, 4, [52, 52, 51, 51])],
)
def test_verl_6869_sizes_differ_by_one_at_most(rows, ranks, sizes):
    lengths = [random.Random(rows).randint(1, 90) for _ in range(rows)]
    found = partition(lengths, [0] * rows, range(rows), ranks, PartitionSettings(max_tokens_per_microbatch=100))
    dealt = [[row for micro in rank[0] for row in micro] for rank in found.ranks]
    assert sorted(map(len, dealt), reverse=True) == sizes
    assert sorted(chain(*dealt)) == list(range(rows))
    assert len({len(rank[0]) for rank in found.ranks}) == 1


# Verl 6176: every rank has as many micro batches


def test_verl_6176_a_rank_with_less_splits_or_adds_empty_ones():
    lengths = [60, 60, 60, 40, 40, 20]
    found = partition(lengths, [0] * 6, range(6), 2, PartitionSettings(max_tokens_per_microbatch=100))
    assert len({len(rank[0]) for rank in found.ranks}) == 1
    for rank in found.ranks:
        for micro in rank[0]:
            assert sum(lengths[row] for row in micro) <= 100


def test_verl_6176_the_loss_is_the_same_over_all_tokens():
    lengths = [60, 60, 60, 40, 40, 20]
    losses = [[1.0 + row] * length for row, length in enumerate(lengths)]
    weights = row_weights(lengths, range(6), Aggregation.TOKEN_MEAN)
    found = partition(lengths, [0] * 6, range(6), 2, PartitionSettings(max_tokens_per_microbatch=100))
    parts = [sum(weights[row] * sum(losses[row]) for micro in rank[0] for row in micro) for rank in found.ranks]
    assert sum(parts) == pytest.approx(sum(map(sum, losses)) / 280)


# Areal 898: long rows are spread


@pytest.mark.parametrize(("lengths", "best"), [([100, 90, 80, 70, 10, 10, 10, 10], 190), ([1000] * 4 + [10] * 4, 2020)])
def test_areal_898_counts_and_sums_are_even(lengths, best):
    bins = balanced_kk(lengths, 2)
    assert [len(members) for members in bins] == [4, 4]
    assert max(bin_sums(lengths, bins)) <= best * 1.05


def test_areal_898_siblings_are_on_different_ranks():
    lengths, groups = [1000] * 4 + [10] * 4, [0, 0, 1, 1, 2, 2, 3, 3]
    found = partition(lengths, [0] * 8, groups, 2, PartitionSettings(max_tokens_per_microbatch=5000))
    for rank in found.ranks:
        assert sorted(groups[row] for micro in rank[0] for row in micro) == [0, 1, 2, 3]


# Verl 593: modes are named and exact

VERL_593_ROWS = ([1, 2, 3, 4], [10])
VERL_593_MODES = (
    (Aggregation.TOKEN_MEAN, None, 4.0),
    (Aggregation.CONSTANT, 1.0, 10.0),
    (Aggregation.SEQ_MEAN, None, 6.25),
    (Aggregation.CONSTANT, 4.0, 2.5),
)


@pytest.mark.parametrize(("mode", "divisor", "right"), VERL_593_MODES)
def test_verl_593_the_value_of_each_mode(mode, divisor, right):
    assert total_loss(VERL_593_ROWS, [0, 1], mode, divisor) == pytest.approx(right, abs=1e-6)


@pytest.mark.parametrize(("mode", "divisor", "right"), VERL_593_MODES)
def test_verl_593_a_row_without_trained_tokens_changes_none(mode, divisor, right):
    assert total_loss((*VERL_593_ROWS, []), [0, 1, 1], mode, divisor) == pytest.approx(right, abs=1e-6)


# PrimeRl 2562: weights are global


def test_prime_rl_2562_tokens_weigh_the_same_on_every_rank():
    losses = ([1, 2, 3, 4], [10])
    weights = row_weights([4, 1], [0, 1], Aggregation.TOKEN_MEAN)
    parts = [weight * sum(tokens) for weight, tokens in zip(weights, losses, strict=True)]
    assert sum(parts) == pytest.approx(4.0)


def test_prime_rl_2562_micro_batches_of_gradient_accumulation_add_up():
    counts, means = [10, 2, 4], [1, 4, 2]
    weights = row_weights(counts, [0, 1, 2], Aggregation.TOKEN_MEAN)
    assert float(np.dot(weights, np.multiply(counts, means))) == pytest.approx(1.625)


def test_prime_rl_2562_sequence_means_over_ranks():
    weights = row_weights([1, 1, 1, 1], range(4), Aggregation.SEQ_MEAN)
    assert float(weights @ np.array([1, 2, 3, 10])) == pytest.approx(4.0)


# Trl 4159: one temperature
