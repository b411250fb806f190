"""KL divergences from sampled log-probs. d = log π − log πref; expectation under π is meant. Knows no policy loss.

k1 = d, k2 = d²/2, k3 = e^(−d) − 1 + d, abs = |d| (Schulman 2020, "Approximating KL divergence"). Shapes are free.
"""

from typing import Literal

import msgspec
import torch
from torch import Tensor

from stages.learning.losses.batch import bounded_exp, log_ratio
from stages.learning.losses.checks import above, at_least, choice

Estimator = Literal["k1", "k2", "k3", "abs"]


class KlEstimate(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a divergence is estimated from one sample per token."""

    estimator: Estimator = "k3"
    gradient_of_k2: bool = False
    """Keep the estimator's value and take k2's gradient, whose expectation is that of the true KL."""
    log_ratio_clamp: float | None = None
    """d is limited to ±this inside k3's exponential and beside it."""
    result_clamp: float | None = None
    """The estimate is limited to ±this (no gradient beyond)."""
    importance_weighted: bool = False
    """Times πθ/πold with its gradient: unbiased where the samples come from an older policy."""

    def __post_init__(self) -> None:
        choice(self.estimator, Estimator, "estimator")
        above(self.log_ratio_clamp, 0, "log_ratio_clamp")
        above(self.result_clamp, 0, "result_clamp")


class KlPenalty(KlEstimate, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A penalty to a reference model, added to each kept token's loss."""

    coef: float

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self.coef, 0, "kl_penalty.coef")


def kl_estimate(logp: Tensor, ref_logp: Tensor, config: KlEstimate, old_logp: Tensor | None = None) -> Tensor:
    """Estimate of KL(π‖πref) at each token, with the gradient that the settings ask for.

    Args:
        logp: log-probs under the current policy.
        ref_logp: under the reference.
        config: the estimator.
        old_logp: under the policy that sampled; used when `importance_weighted`.
    """
    d = log_ratio(logp, ref_logp)
    value = _estimate(d, config)
    if config.gradient_of_k2:
        k2 = d.square() / 2
        value = value.detach() + k2 - k2.detach()
    if config.importance_weighted and old_logp is not None:
        value = value * bounded_exp(log_ratio(logp, old_logp), config.log_ratio_clamp)
    return value if config.result_clamp is None else value.clamp(-config.result_clamp, config.result_clamp)


def _estimate(d: Tensor, config: KlEstimate) -> Tensor:
    match config.estimator:
        case "k1":
            return d
        case "abs":
            return d.abs()
        case "k2":
            return d.square() / 2
        case "k3":
            limited = d if config.log_ratio_clamp is None else d.clamp(-config.log_ratio_clamp, config.log_ratio_clamp)
            return torch.expm1(-limited) + limited


def binary_kl(logp: Tensor, logq: Tensor) -> Tensor:
    """KL between "this token or not" under p and under q: p·log(p/q) + (1−p)·log((1−p)/(1−q)).

    1 − p is taken from log p by expm1, so tokens near probability 1 keep their digits and two certain tokens give 0.
    """
    p = logp.exp()
    rest = -torch.expm1(logp)
    rest_log_ratio = log_ratio(log1m_exp(logp), log1m_exp(logq))
    return _product(p, log_ratio(logp, logq)) + _product(rest, rest_log_ratio)


def log1m_exp(logp: Tensor) -> Tensor:
    """log(1 − p) from log p without cancellation at either end; −inf at p = 1."""
    near_one = logp > -0.6931  # log ½: below it log1p keeps more digits, above it expm1 does
    return torch.where(near_one, torch.log(-torch.expm1(logp)), torch.log1p(-logp.exp()))


def _product(weight: Tensor, value: Tensor) -> Tensor:
    """weight·value with 0·∞ = 0, the limit of x·log x."""
    return torch.where(weight == 0, torch.zeros_like(value), weight * value)
