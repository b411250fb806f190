"""VESPO by its formula, row by row."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stages.learning.losses.batch import LossBatch
from stages.learning.losses.config import LossConfig
from stages.learning.losses.policy import policy_loss
from stages.learning.losses.vespo import Vespo
from stages.learning.packing import cu_seqlens
from stages.learning.rows import Rows

LOG_RATIOS = st.lists(st.floats(-0.4, 0.4), min_size=1, max_size=4)


@settings(max_examples=20, deadline=None)
@given(rows=st.lists(st.tuples(LOG_RATIOS, st.floats(-2, 2)), min_size=1, max_size=3))
def test_the_gradient_is_the_gamma_weight_of_the_rows_importance_times_its_advantage(rows):
    log_ratios = torch.tensor([value for row, _ in rows for value in row], dtype=torch.float64)
    advantages = torch.tensor([advantage for row, advantage in rows for _ in row], dtype=torch.float64)
    old_T = torch.full_like(log_ratios, -1.0)
    logp_T = (old_T + log_ratios).requires_grad_()
    batch = LossBatch(
        rows=Rows.from_cu_seqlens(cu_seqlens([len(row) for row, _ in rows])),
        loss_mask_T=torch.ones(len(logp_T), dtype=torch.bool),
        advantages_T=advantages,
        old_logp_T=old_T,
    )
    loss_T, _ = policy_loss(logp_T, batch, LossConfig(method=Vespo()))
    (grad_T,) = torch.autograd.grad(loss_T.sum(), logp_T)
    want = []
    for row, advantage in rows:
        weight = math.exp(sum(row))
        k, rate = (2.0, 3.0) if advantage >= 0 else (3.0, 2.0)
        want += [-advantage * math.exp(rate) * weight**k * math.exp(-rate * weight)] * len(row)
    assert grad_T.tolist() == pytest.approx(want, rel=1e-9, abs=1e-12)
