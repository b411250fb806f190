"""Advantages of tokens by what a step of GAE is, against sums by hand."""

import pytest
import torch

from stages.learning.attention import pack_layout
from stages.learning.losses.batch import LossBatch
from stages.learning.losses.kl import KlPenalty
from stages.learning.rows import Rows
from stages.training.batches import MicroBatch
from stages.training.token_advantages import AdvantageSettings, Row, token_advantages

REWARD = 2.0
GAPS = (0.3, -0.1, 0.4)
"""log π − log πref of the three trained tokens: a turn of two, a gap, a turn of one."""


def _advantages(unit):
    layout = pack_layout([4], torch.device("cpu"))
    mask_T = torch.tensor([True, True, False, True])
    gap_T = torch.zeros(4)
    gap_T[mask_T] = torch.tensor(GAPS)
    loss = LossBatch(
        rows=Rows.from_cu_seqlens(layout.cu_seqlens),
        loss_mask_T=mask_T,
        advantages_T=torch.zeros(4),
        old_logp_T=gap_T,
        ref_logp_T=torch.zeros(4),
    )
    batch = MicroBatch(
        tokens_T=torch.zeros(4, dtype=torch.int64),
        layout=layout,
        target_N=mask_T.nonzero().squeeze(-1),
        weight_T=torch.ones(4),
        loss=loss,
    )
    row = Row(
        reward_R=torch.tensor([REWARD]),
        group_R=torch.zeros(1, dtype=torch.int64),
        turns_T=torch.tensor([0, 0, -1, 1]),
    )
    settings = AdvantageSettings(unit=unit, kl_reward=KlPenalty(coef=1.0, estimator="k1"))
    filled, returns, _ = token_advantages(
        [batch], [row], None, settings, from_rewards=True, num_groups=1, reduce=lambda x: x
    )
    return filled[0].loss.advantages_T[mask_T].tolist(), returns[0][mask_T].tolist()


def test_with_tokens_as_steps_each_token_answers_for_the_kl_from_itself_on():
    to_come = [REWARD - sum(GAPS[start:]) for start in range(3)]
    assert _advantages("token") == (pytest.approx(to_come), pytest.approx(to_come))


def test_with_turns_as_steps_each_token_keeps_its_own_kl_and_returns_have_none():
    advantages, returns = _advantages("turn")
    assert advantages == pytest.approx([REWARD - gap for gap in GAPS])
    assert returns == pytest.approx([REWARD] * 3)
