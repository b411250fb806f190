"""What holds for every loss: packing doesn't matter, junk outside the mask doesn't matter, nothing trained gives nothing."""

from dataclasses import fields, replace
from itertools import pairwise

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from stages.learning.losses.batch import LossBatch
from stages.learning.losses.config import LossConfig
from stages.learning.losses.importance import Filter
from stages.learning.losses.minibatch import only_rank, prepare_minibatch
from stages.learning.losses.policy import policy_loss
from stages.learning.rows import Rows


def step(
    logp_T: Tensor, packs: list[Tensor], whole: LossBatch, config: LossConfig
) -> tuple[Tensor, Tensor, dict[str, float]]:
    """Σ w·ℓ with a weight per row, over packs given as lists of rows; gradient of every token; statistics of the step."""
    leaf_T = logp_T.clone().requires_grad_()
    borders = torch.bincount(whole.rows.row_T, minlength=whole.rows.num_rows).cumsum(0)
    starts = [0, *borders.tolist()]
    tokens = [torch.cat([torch.arange(starts[row], starts[row + 1]) for row in rows.tolist()]) for rows in packs]
    batches = [pick(whole, index_T, rows) for index_T, rows in zip(tokens, packs, strict=True)]
    total, sums, counts = leaf_T.new_zeros(()), {}, {}
    for batch, index_T, rows in zip(prepare_minibatch(batches, config, only_rank), tokens, packs, strict=True):
        loss_T, stats = policy_loss(leaf_T[index_T], batch, config)
        weight_R = 1 / (1 + rows.to(leaf_T.dtype))  # any weight that belongs to a row
        total = total + (batch.rows.spread(weight_R) * loss_T).sum()
        for name, stat in stats.items():
            sums[name] = sums.get(name, 0.0) + float(stat.total)
            counts[name] = counts.get(name, 0) + int(stat.count)
    (grad_T,) = torch.autograd.grad(total, leaf_T) if total.requires_grad else (torch.zeros_like(leaf_T),)
    return total.detach(), grad_T, {name: sums[name] / max(counts[name], 1) for name in sums}


def pick(whole: LossBatch, index_T: Tensor, rows: Tensor) -> LossBatch:
    """The rows of one pack."""
    length = len(whole.loss_mask_T)
    cut = {
        field.name: value[index_T]
        for field in fields(whole)
        if isinstance(value := getattr(whole, field.name), Tensor) and value.shape == (length,)
    }
    lengths = torch.bincount(whole.rows.row_T, minlength=whole.rows.num_rows)[rows]
    borders = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    return replace(whole, **cut, rows=Rows.from_cu_seqlens(borders))


@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(order=st.permutations(range(6)), cuts=st.sets(st.integers(1, 5), max_size=4), seed=st.integers(0, 10))
def test_loss_gradient_and_statistics_are_the_same_however_rows_are_packed(any_config, make_batch, order, cuts, seed):
    logp_T, whole = make_batch(lengths=(5, 3, 1, 6, 2, 4), seed=seed)
    together = step(logp_T, [torch.arange(6)], whole, any_config)
    borders = [0, *sorted(cuts), 6]
    packs = [torch.tensor(order[a:b]) for a, b in pairwise(borders)]
    apart = step(logp_T, packs, whole, any_config)
    torch.testing.assert_close(apart[0], together[0], rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(apart[1], together[1], rtol=1e-10, atol=1e-12)
    assert apart[2] == pytest.approx(together[2], rel=1e-10, abs=1e-12)


@pytest.mark.parametrize("junk", [float("nan"), float("inf"), -float("inf"), 1e30])
def test_junk_outside_the_mask_reaches_neither_loss_nor_gradient_nor_statistics(any_config, make_batch, junk):
    logp_T, batch = make_batch()
    clean = step(logp_T, [torch.arange(4)], batch, any_config)
    spoilt = {
        field.name: torch.where(batch.loss_mask_T, value, torch.as_tensor(junk, dtype=value.dtype))
        for field in fields(batch)
        if isinstance(value := getattr(batch, field.name), Tensor) and value.dtype == torch.float64
    }
    dirty_T = torch.where(batch.loss_mask_T, logp_T, junk)
    found = step(dirty_T, [torch.arange(4)], replace(batch, **spoilt), any_config)
    torch.testing.assert_close(found[0], clean[0])
    torch.testing.assert_close(found[1], clean[1])
    assert found[2] == pytest.approx(clean[2], nan_ok=False)


def test_nothing_trained_gives_zero_everywhere(any_config, make_batch):
    logp_T, batch = make_batch()
    nothing = replace(batch, loss_mask_T=torch.zeros_like(batch.loss_mask_T))
    loss, grad_T, stats = step(logp_T, [torch.arange(4)], nothing, any_config)
    assert float(loss) == 0
    assert bool((grad_T == 0).all())
    assert set(stats.values()) == {0.0}


def test_a_micro_batch_without_tokens_is_fine(any_config, make_batch):
    _, batch = make_batch(lengths=())
    loss_T, stats = policy_loss(
        torch.zeros(0, dtype=torch.float64), prepare_minibatch([batch], any_config, only_rank)[0], any_config
    )
    assert loss_T.shape == (0,)
    assert all(int(stat.count) == 0 for stat in stats.values())


def test_a_masked_row_gets_no_gradient_and_changes_no_other(any_config, make_batch):
    logp_T, batch = make_batch()
    masked = replace(batch, loss_mask_T=batch.loss_mask_T & (batch.rows.row_T != 3))
    alone = step(logp_T[:9], [torch.arange(3)], pick(batch, torch.arange(9), torch.arange(3)), any_config)
    found = step(logp_T, [torch.arange(4)], masked, any_config)
    assert bool((found[1][9:] == 0).all())
    torch.testing.assert_close(found[1][:9], alone[1])
    torch.testing.assert_close(found[0], alone[0])


def test_a_rejected_token_with_an_infinite_ratio_leaves_no_nan(make_batch):
    logp_T, batch = make_batch()
    prox_T = batch.prox_logp_T.clone()
    prox_T[:2] = -torch.inf
    config = LossConfig(proximal="recompute", behaviour_weight="token", filters=(Filter(upper=2.0, lower=0.5),))
    whole = replace(batch, prox_logp_T=prox_T, loss_mask_T=torch.ones_like(batch.loss_mask_T))
    loss, grad_T, _ = step(logp_T, [torch.arange(4)], whole, config)
    assert bool(loss.isfinite())
    assert bool(grad_T.isfinite().all())
    assert bool((grad_T[:2] == 0).all())


def test_statistics_hold_no_graph(any_config, make_batch):
    logp_T, batch = make_batch()
    ready = prepare_minibatch([batch], any_config, only_rank)[0]
    _, stats = policy_loss(logp_T.requires_grad_(), ready, any_config)
    assert not any(stat.total.requires_grad for stat in stats.values())
