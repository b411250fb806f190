"""PPO: the clipped surrogate, with dual clip. Schulman et al. 2017 (arXiv:1707.06347), Ye et al. 2020 (arXiv:1912.09729).

ℓ = max(−A·r, −A·clip(r, 1−ε, 1+ε_hi)), and ℓ = min(ℓ, c·|A|) with dual clip, which acts only where A < 0.
"""

import msgspec
import torch
from torch import Tensor

from stages.learning.losses.batch import Surrogate, Tokens
from stages.learning.losses.checks import above, at_least


class Ppo(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="ppo"):
    """Token-level clipped surrogate; against the behaviour policy, or decoupled with a proximal policy (`proximal`)."""

    eps_clip: float = 0.2
    eps_clip_higher: float | None = None
    """Upper ε; None: the same as `eps_clip`."""
    dual_clip: float | None = None
    """c > 1: bound c·|A| of the loss where A < 0."""

    def __post_init__(self) -> None:
        check_clip(self.eps_clip, self.eps_clip_higher, self.dual_clip)


def ppo(tokens: Tokens, config: Ppo) -> Surrogate:
    """The surrogate of each token."""
    ratio_T = tokens.ratio(tokens.log_ratio_T)
    return clipped_surrogate(ratio_T, tokens.advantages_T, config.eps_clip, config.eps_clip_higher, config.dual_clip)


def clipped_surrogate(
    ratio_T: Tensor, advantages_T: Tensor, eps_clip: float, eps_clip_higher: float | None, dual_clip: float | None
) -> Surrogate:
    """The clipped surrogate of any ratio: per token (PPO) or per row (GSPO)."""
    upper = 1 + (eps_clip if eps_clip_higher is None else eps_clip_higher)
    plain_T = -advantages_T * ratio_T
    bounded_T = -advantages_T * ratio_T.clamp(1 - eps_clip, upper)
    loss_T = torch.maximum(plain_T, bounded_T)
    dual_clipped_T = None
    if dual_clip is not None:
        cap_T = dual_clip * advantages_T.abs()
        dual_clipped_T = (advantages_T < 0) & (cap_T < loss_T)
        loss_T = torch.where(dual_clipped_T, cap_T, loss_T)
    return Surrogate(loss_T=loss_T, ratio_T=ratio_T, clipped_T=bounded_T > plain_T, dual_clipped_T=dual_clipped_T)


def check_clip(eps_clip: float, eps_clip_higher: float | None, dual_clip: float | None) -> None:
    """Refuse clip settings that have no meaning."""
    at_least(eps_clip, 0, "eps_clip")
    at_least(eps_clip_higher, 0, "eps_clip_higher")
    above(dual_clip, 1, "dual_clip")
