"""DPPO: a trust region on the probabilities themselves instead of their ratio. arXiv:2602.04879.

ℓ = −τ·A·r on tokens inside the region, + kl_tau·(log r)² on all trained tokens. A token leaves the region when its probability
moved too far in the direction that A pushes it: by binary total variation |p − q| or by the binary KL(q‖p), q the anchor policy.
With `applies = "always"` the sign of A doesn't matter (IPO).
"""

from typing import Literal

import msgspec
import torch
from torch import Tensor

from stages.learning.losses.batch import Surrogate, Tokens
from stages.learning.losses.checks import above, at_least, choice
from stages.learning.losses.errors import LossConfigError
from stages.learning.losses.kl import binary_kl

Divergence = Literal["binary_tv", "binary_kl"]
Applies = Literal["advantage_sign", "always"]


class Dppo(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="dppo"):
    """Ratio policy gradient inside a divergence trust region."""

    divergence: Divergence = "binary_tv"
    threshold_low: float | None = 0.2
    """Largest divergence of a probability that fell; None: no bound."""
    threshold_high: float | None = 0.2
    """Largest divergence of a probability that rose; None: no bound."""
    applies: Applies = "advantage_sign"
    """advantage_sign: rising tokens are bounded where A > 0, falling ones where A ≤ 0; always: both for every token."""
    ratio_cap: float | None = None
    """Truncate r at this value; its gradient is then that of the truncated weight, not 0."""
    adv_tau: float = 1.0
    kl_tau: float = 0.0

    def __post_init__(self) -> None:
        choice(self.divergence, Divergence, "divergence")
        choice(self.applies, Applies, "applies")
        for field in ("threshold_low", "threshold_high", "ratio_cap"):
            above(getattr(self, field), 0, field)
        at_least(self.adv_tau, 0, "adv_tau")
        at_least(self.kl_tau, 0, "kl_tau")
        if self.threshold_low is None and self.threshold_high is None:
            raise LossConfigError("dppo needs threshold_low or threshold_high: without either it has no trust region")


def dppo(tokens: Tokens, config: Dppo) -> Surrogate:
    """The bounded policy gradient of each token."""
    ratio_T = tokens.ratio(tokens.log_ratio_T)
    used_T = ratio_T
    if config.ratio_cap is not None:
        used_T = ratio_T.detach().clamp(max=config.ratio_cap) * (1 + tokens.logp_T - tokens.logp_T.detach())
    outside_T = _outside(tokens, config)
    policy_T = torch.where(outside_T, 0, -config.adv_tau * tokens.advantages_T * used_T)
    loss_T = policy_T + config.kl_tau * tokens.log_ratio_T.square() if config.kl_tau else policy_T
    return Surrogate(loss_T=loss_T, ratio_T=ratio_T, clipped_T=outside_T)


def _outside(tokens: Tokens, config: Dppo) -> Tensor:
    logp_T, anchor_T = tokens.logp_T.detach(), tokens.anchor_logp_T
    moved_T = logp_T.exp() - anchor_T.exp()
    rose_T, fell_T = moved_T > 0, moved_T < 0
    divergence_T = moved_T.abs() if config.divergence == "binary_tv" else binary_kl(anchor_T, logp_T)
    nowhere_T = torch.zeros_like(rose_T)
    high_T = nowhere_T if config.threshold_high is None else rose_T & (divergence_T > config.threshold_high)
    low_T = nowhere_T if config.threshold_low is None else fell_T & (divergence_T > config.threshold_low)
    if config.applies == "always":
        return high_T | low_T
    return torch.where(tokens.advantages_T > 0, high_T, low_T)
