"""Reported faults of other trainers: aggregation over packs, ranks and micro-batches, with this project's row weights and losses."""

import pytest
import torch

from stages.assembly.weights import Aggregation, row_weights
from stages.learning.losses.batch import LossBatch
from stages.learning.losses.config import LossConfig
from stages.learning.losses.policy import policy_loss
from stages.learning.losses.reinforce import Likelihood
from stages.learning.packing import cu_seqlens
from stages.learning.rows import Rows


def step_loss(packs, weights, masks=None):
    """Σ w·ℓ over packs of rows whose per-token losses are given: likelihood has ℓ = −log π."""
    total, rows_seen = 0.0, 0
    for index, pack in enumerate(packs):
        rows = Rows.from_cu_seqlens(cu_seqlens([len(row) for row in pack]))
        losses_T = torch.tensor([value for row in pack for value in row], dtype=torch.float64)
        mask_T = torch.ones(len(losses_T), dtype=torch.bool)
        if masks is not None:
            mask_T = torch.tensor([flag for row in masks[index] for flag in row], dtype=torch.bool)
        batch = LossBatch(rows=rows, loss_mask_T=mask_T, advantages_T=torch.zeros_like(losses_T), old_logp_T=-losses_T)
        loss_T, _ = policy_loss(-losses_T, batch, LossConfig(method=Likelihood()))
        weight_R = torch.as_tensor(weights[rows_seen : rows_seen + rows.num_rows], dtype=torch.float64)
        total += float((rows.spread(weight_R) * loss_T).sum())
        rows_seen += rows.num_rows
    return total


def weights_for(counts, mode, divisor=None):
    return row_weights(counts, list(range(len(counts))), Aggregation(mode), divisor).tolist()


PACKINGS = [
    [[[1, 1], [7]], [[2, 2]]],
    [[[1, 1]], [[7], [2, 2]]],
    [[[1, 1]], [[7]], [[2, 2]]],
    [[[1, 1], [7], [2, 2]], [[]]],
]


@pytest.mark.parametrize(
    ("mode", "divisor", "want"), [("token_mean", None, 2.6), ("seq_mean", None, 10 / 3), ("constant", 1.0, 13 / 3)]
)
@pytest.mark.parametrize("packs", PACKINGS, ids=["two and one", "one and two", "alone", "with an empty row"])
def test_a_packed_row_is_no_sample(packs, mode, divisor, want):
    """google/tunix#1662."""
    counts = [len(row) for pack in packs for row in pack]
    assert step_loss(packs, weights_for(counts, mode, divisor)) == pytest.approx(want, abs=1e-6)


@pytest.mark.parametrize(
    ("mode", "divisor", "want"),
    [("token_mean", None, 4.0), ("constant", 1.0, 10.0), ("seq_mean", None, 6.25), ("constant", 4.0, 2.5)],
)
@pytest.mark.parametrize("with_empty_row", [False, True])
def test_modes_differ_and_padding_never_counts(mode, divisor, want, with_empty_row):
    """verl-project/verl#593."""
    rows, masks = [[1, 2, 3, 4], [10, 99, 99, 99]], [[1, 1, 1, 1], [1, 0, 0, 0]]
    if with_empty_row:
        rows, masks = [*rows, [5, 5]], [*masks, [0, 0]]
    weights = weights_for([sum(mask) for mask in masks], mode, divisor)
    assert step_loss([rows], weights, [masks]) == pytest.approx(want, abs=1e-6)


def test_ranks_and_micro_batches_share_one_denominator():
    """PrimeIntellect-ai/prime-rl#2562: the sum over ranks, not the mean of their means."""
    two_ranks = weights_for([4, 1], "token_mean")
    assert step_loss([[[1, 2, 3, 4]]], two_ranks[:1]) + step_loss([[[10]]], two_ranks[1:]) == pytest.approx(
        4.0, abs=1e-6
    )
    accumulated = weights_for([10, 2, 4], "token_mean")
    rows = [[1] * 10, [4] * 2, [2] * 4]
    micro_batches = [step_loss([[row]], [weight]) for row, weight in zip(rows, accumulated, strict=True)]
    assert sum(micro_batches) == pytest.approx(1.625, abs=1e-6)
    by_row = weights_for([1, 1, 1, 1], "seq_mean")
    assert step_loss([[[1], [2], [3]]], by_row[:3]) + step_loss([[[10]]], by_row[3:]) == pytest.approx(4.0, abs=1e-6)
