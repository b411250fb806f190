"""GMPO: the geometric mean of token ratios, each clipped first. Zhao et al. 2025 (arXiv:2507.20673).

s = exp(mean over the row's kept tokens of the log ratio, clipped to [−ε, ε_hi] on the side that A pushes to), ℓ = −A·s with A
the row's mean. Unlike GSPO the clip is per token and inside the mean.
"""

import msgspec
import torch

from stages.learning.losses.batch import Surrogate, Tokens
from stages.learning.losses.ppo import check_clip


class Gmpo(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="gmpo"):
    """Row-level surrogate with a clip per token."""

    eps_clip: float = 0.4
    """Lower bound of a token's log ratio."""
    eps_clip_higher: float | None = None
    """Upper bound of a token's log ratio; None: the same as `eps_clip`."""

    def __post_init__(self) -> None:
        check_clip(self.eps_clip, self.eps_clip_higher, None)


def gmpo(tokens: Tokens, config: Gmpo) -> Surrogate:
    """The row's surrogate at each of its tokens."""
    rows, log_ratio_T = tokens.rows, tokens.log_ratio_T
    higher = config.eps_clip if config.eps_clip_higher is None else config.eps_clip_higher
    bounded_T = log_ratio_T.clamp(-config.eps_clip, higher)
    sign_T = tokens.advantages_T.sign()
    used_T = sign_T * torch.minimum(sign_T * log_ratio_T, sign_T * bounded_T)
    ratio_T = rows.spread(tokens.ratio(rows.mean(used_T, tokens.keep_T)))
    advantages_T = rows.spread(rows.mean(tokens.advantages_T, tokens.keep_T))
    return Surrogate(loss_T=-advantages_T * ratio_T, ratio_T=ratio_T, clipped_T=bounded_T != log_ratio_T)
