"""SAPO: a soft gate in place of the clip. arXiv:2511.20347.

ℓ = −A·(4/τ)·σ(τ·(r − 1)) with τ = τ_pos where A > 0, else τ_neg; the gradient at r = 1 is PPO's.
"""

from typing import Literal

import msgspec
import torch

from stages.learning.losses.batch import Surrogate, Tokens
from stages.learning.losses.checks import above, choice

Level = Literal["token", "sequence"]


class Sapo(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="sapo"):
    """Gated surrogate."""

    tau_pos: float = 1.0
    tau_neg: float = 1.05
    """Above `tau_pos`: the gate closes faster on tokens that are pushed down, which spread over the whole vocabulary."""
    level: Level = "token"
    """sequence: r is the geometric mean over the row's kept tokens."""

    def __post_init__(self) -> None:
        above(self.tau_pos, 0, "tau_pos")
        above(self.tau_neg, 0, "tau_neg")
        choice(self.level, Level, "level")


def sapo(tokens: Tokens, config: Sapo) -> Surrogate:
    """The gated advantage of each token."""
    log_ratio_T = tokens.log_ratio_T
    if config.level == "sequence":
        log_ratio_T = tokens.rows.spread(tokens.rows.mean(log_ratio_T, tokens.keep_T))
    ratio_T = tokens.ratio(log_ratio_T)
    gate_pos_T = torch.sigmoid(config.tau_pos * (ratio_T - 1)) * (4 / config.tau_pos)
    gate_neg_T = torch.sigmoid(config.tau_neg * (ratio_T - 1)) * (4 / config.tau_neg)
    gate_T = torch.where(tokens.advantages_T > 0, gate_pos_T, gate_neg_T)
    return Surrogate(
        loss_T=-tokens.advantages_T * gate_T,
        ratio_T=ratio_T,
        clipped_T=torch.zeros_like(tokens.mask_T),
        extra={"sapo_gate": gate_T, "sapo_gate_pos": gate_pos_T, "sapo_gate_neg": gate_neg_T},
    )
