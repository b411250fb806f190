"""One gradient step moves probability the right way, for every loss."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from stages.learning.logprobs import logprobs_from_logits
from stages.learning.losses.batch import LossBatch
from stages.learning.losses.config import LossConfig
from stages.learning.losses.critic import CriticConfig, value_loss
from stages.learning.losses.minibatch import only_rank, prepare_minibatch
from stages.learning.losses.policy import policy_loss
from stages.learning.losses.reinforce import Likelihood
from stages.learning.rows import Rows

TOKENS = torch.tensor([0, 3, 1, 2, 4, 0])
VOCABULARY = 5


def logits_TV() -> Tensor:
    return 0.5 * torch.randn(len(TOKENS), VOCABULARY, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def batch_for(logp_T: Tensor, advantages_T: Tensor, entropy_T: Tensor) -> LossBatch:
    """Two rows of three tokens, on policy: r = 1 everywhere, so nothing is clipped, dropped or gated."""
    return LossBatch(
        rows=Rows.from_cu_seqlens(torch.tensor([0, 3, 6])),
        loss_mask_T=torch.ones(len(TOKENS), dtype=torch.bool),
        advantages_T=advantages_T,
        old_logp_T=logp_T.detach(),
        prox_logp_T=logp_T.detach(),
        ref_logp_T=logp_T.detach(),
        teacher_logp_T=logp_T.detach(),
        entropy_T=entropy_T,
        versions_T=torch.full((len(TOKENS),), 5),
        current_version=6,
    )


def moved(config: LossConfig, advantages_T: Tensor, **changes: Tensor) -> Tensor:
    """Change of each sampled token's log-prob after one small step down the gradient of the mean loss."""
    start_TV = logits_TV().requires_grad_()
    logp_T, entropy_T = logprobs_from_logits(start_TV, TOKENS)
    batch = replace(batch_for(logp_T, advantages_T, entropy_T), **changes)
    ready = prepare_minibatch([batch], config, only_rank)[0]
    loss_T, _ = policy_loss(logp_T, ready, config)
    (grad_TV,) = torch.autograd.grad(loss_T.mean(), start_TV)
    after_T, _ = logprobs_from_logits(start_TV.detach() - 0.1 * grad_TV, TOKENS)
    return after_T - logp_T.detach()


# With their teacher or penalty these are pulled by more than the advantage; each has a test of its own below.
def by_advantage(config: LossConfig) -> bool:
    alone = config.distillation is None and config.kl_penalty is None and not config.entropy_coef
    return alone and not isinstance(config.method, Likelihood)


def test_a_step_raises_tokens_with_positive_and_lowers_those_with_negative_advantage(any_config):
    if not by_advantage(any_config):
        any_config = LossConfig(
            method=any_config.method, proximal=any_config.proximal, m2po_threshold=any_config.m2po_threshold
        )
    if isinstance(any_config.method, Likelihood):
        return  # reads no advantage: it has a test of its own
    up_T = torch.tensor([1.0, 1.0, 1.0, -1.0, -1.0, -1.0], dtype=torch.float64)
    found_T = moved(any_config, up_T)
    assert bool((found_T[:3] > 0).all())
    assert bool((found_T[3:] < 0).all())


def test_an_advantage_of_zero_moves_nothing(any_config):
    plain = LossConfig(method=any_config.method, proximal=any_config.proximal)
    if isinstance(any_config.method, Likelihood):
        return  # same
    assert bool((moved(plain, torch.zeros(6, dtype=torch.float64)) == 0).all())


def test_likelihood_raises_every_token():
    assert bool((moved(LossConfig(method=Likelihood()), torch.zeros(6, dtype=torch.float64)) > 0).all())


@pytest.mark.parametrize("name", ["kd", "kd advantage", "kdrl"])
def test_distillation_raises_what_the_teacher_likes_better(configs, name):
    nothing_T = torch.zeros(6, dtype=torch.float64)
    logp_T, _ = logprobs_from_logits(logits_TV(), TOKENS)
    teacher_T = logp_T + torch.tensor([0.5, 0.5, 0.5, -0.5, -0.5, -0.5])
    found_T = moved(configs[name], nothing_T, teacher_logp_T=teacher_T)
    if (
        name == "kdrl"
    ):  # its single-sample gradient is +coef for every token; only the expectation points to the teacher
        assert bool((found_T < 0).all())
    else:
        assert bool((found_T[:3] > 0).all())
        assert bool((found_T[3:] < 0).all())


@pytest.mark.parametrize("name", ["kl penalty", "kl penalty k2+"])
def test_a_kl_penalty_pulls_towards_the_reference(configs, name):
    nothing_T = torch.zeros(6, dtype=torch.float64)
    logp_T, _ = logprobs_from_logits(logits_TV(), TOKENS)
    reference_T = logp_T + torch.tensor([0.5, 0.5, 0.5, -0.5, -0.5, -0.5])
    found_T = moved(configs[name], nothing_T, ref_logp_T=reference_T)
    assert bool((found_T[:3] > 0).all())
    assert bool((found_T[3:] < 0).all())


def test_an_entropy_bonus_raises_entropy(configs):
    start_TV = logits_TV().requires_grad_()
    logp_T, entropy_T = logprobs_from_logits(start_TV, TOKENS)
    batch = batch_for(logp_T, torch.zeros(6, dtype=torch.float64), entropy_T)
    loss_T, _ = policy_loss(logp_T, batch, configs["entropy"])
    (grad_TV,) = torch.autograd.grad(loss_T.mean(), start_TV)
    _, after_T = logprobs_from_logits(start_TV.detach() - grad_TV, TOKENS)
    assert bool((after_T > entropy_T.detach()).all())


def test_ppo_stops_pushing_a_token_that_has_moved_far_enough():
    logp_T, _ = logprobs_from_logits(logits_TV(), TOKENS)
    beyond_T = logp_T - torch.tensor([1.0, 0, 0, -1.0, 0, 0])  # r = e at the first token, 1/e at the fourth
    advantages_T = torch.tensor([1.0, 1, 1, -1, -1, -1], dtype=torch.float64)
    found_T = moved(LossConfig(), advantages_T, old_logp_T=beyond_T)
    assert found_T[0] == 0
    assert found_T[3] == 0
    assert bool((found_T[[1, 2]] > 0).all())


@pytest.mark.parametrize("form", ["mse", "huber"])
def test_the_critic_moves_to_the_returns(form):
    values_T = torch.tensor([0.0, 1.0, 2.0], requires_grad=True)
    returns_T = torch.tensor([1.0, 1.0, -20.0])
    loss_T, _ = value_loss(
        values_T, None, returns_T, torch.ones(3, dtype=torch.bool), CriticConfig(form=form, value_clip=None)
    )
    (grad_T,) = torch.autograd.grad(loss_T.sum(), values_T)
    assert grad_T[0] < 0
    assert grad_T[1] == 0
    assert grad_T[2] == (10 if form == "huber" else 22)
