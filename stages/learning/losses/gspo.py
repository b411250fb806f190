"""GSPO: one ratio per row, the geometric mean of its tokens' ratios. Zheng et al. 2025 (arXiv:2507.18071).

s = exp(mean over the row's kept tokens of (log πθ − log πprox)), then PPO's clipped surrogate with s for r.
With row weights 1/S instead of 1/(S·d) (`constant`, divisor 1) this is LUSPO.
"""

from typing import Literal

import msgspec

from stages.learning.losses.batch import Surrogate, Tokens
from stages.learning.losses.checks import choice
from stages.learning.losses.ppo import check_clip, clipped_surrogate

AdvantageOf = Literal["row", "token"]
GradientOf = Literal["row", "token"]


class Gspo(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="gspo"):
    """Row-level clipped surrogate."""

    eps_clip: float = 3e-4
    """Row ratios stay much nearer to 1 than token ratios: ε is small."""
    eps_clip_higher: float | None = 4e-4
    dual_clip: float | None = None
    advantage: AdvantageOf = "row"
    """row: the mean of A over the row's kept tokens; token: each token's own (they differ with token-level advantages only)."""
    gradient: GradientOf = "row"
    """row: through the mean; token: through the token alone (GSPO-token), the same where A and the row weight are constant in the row."""

    def __post_init__(self) -> None:
        check_clip(self.eps_clip, self.eps_clip_higher, self.dual_clip)
        choice(self.advantage, AdvantageOf, "advantage")
        choice(self.gradient, GradientOf, "gradient")


def gspo(tokens: Tokens, config: Gspo) -> Surrogate:
    """The row's surrogate at each of its tokens."""
    rows = tokens.rows
    log_ratio_T = rows.spread(rows.mean(tokens.log_ratio_T, tokens.keep_T))
    if config.gradient == "token":
        log_ratio_T = log_ratio_T.detach() + tokens.logp_T - tokens.logp_T.detach()
    advantages_T = tokens.advantages_T
    if config.advantage == "row":
        advantages_T = rows.spread(rows.mean(advantages_T, tokens.keep_T))
    return clipped_surrogate(
        tokens.ratio(log_ratio_T), advantages_T, config.eps_clip, config.eps_clip_higher, config.dual_clip
    )
