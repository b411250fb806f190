"""CISPO: the clipped importance weight scales the policy gradient, and no token loses its gradient. MiniMax-M1 (arXiv:2506.13585).

ℓ = −sg(clip(r, 1−ε, 1+ε_hi))·A·log πθ.
"""

import msgspec

from stages.learning.losses.batch import Surrogate, Tokens
from stages.learning.losses.errors import LossConfigError
from stages.learning.losses.ppo import check_clip


class Cispo(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="cispo"):
    """Weighted policy gradient; the cap of the weight is 1 + `eps_clip_higher`."""

    eps_clip: float = 1.0
    """1: no lower bound, as in the paper."""
    eps_clip_higher: float
    """Without it the weight would have no cap, so there is no default."""

    def __post_init__(self) -> None:
        check_clip(self.eps_clip, self.eps_clip_higher, None)
        if self.eps_clip_higher is None:  # pyright: ignore[reportUnnecessaryComparison] - constructors don't check types
            raise LossConfigError("cispo needs eps_clip_higher: its importance weight is capped at 1 + eps_clip_higher")


def cispo(tokens: Tokens, config: Cispo) -> Surrogate:
    """The weighted log-prob of each token."""
    ratio_T = tokens.ratio(tokens.log_ratio_T)
    capped_T = ratio_T.clamp(1 - config.eps_clip, 1 + config.eps_clip_higher)
    loss_T = -capped_T.detach() * tokens.advantages_T * tokens.logp_T
    return Surrogate(loss_T=loss_T, ratio_T=ratio_T, clipped_T=capped_T != ratio_T)
