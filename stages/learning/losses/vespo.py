"""VESPO: the row's full importance weight W, shaped by a gamma density instead of a clip. arXiv:2602.10693.

ℓ = −sg(φ(W))·A·log πθ, φ(W) = e^λ·W^k·e^(−λ·W) (so φ(1) = 1), W = Π r over the row, times the behaviour weights of its tokens.
"""

import math

import msgspec
import torch

from stages.learning.losses.batch import Surrogate, Tokens
from stages.learning.losses.checks import at_least

# W is kept in [1e-8, e²⁰]: below, φ is 0 for every k in use; above, e^(−λW) is 0. Both ends keep exp finite in float32.
_LOG_W_MIN = math.log(1e-8)
_LOG_W_MAX = 20.0
_LAMBDA_MIN = 1e-4


class Vespo(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="vespo"):
    """Policy gradient scaled by a smooth function of the row's importance weight; k and λ by the sign of A."""

    k_pos: float = 2.0
    lambda_pos: float = 3.0
    k_neg: float = 3.0
    lambda_neg: float = 2.0

    def __post_init__(self) -> None:
        for field in ("k_pos", "lambda_pos", "k_neg", "lambda_neg"):
            at_least(getattr(self, field), 0, field)


def vespo(tokens: Tokens, config: Vespo) -> Surrogate:
    """The scaled log-prob of each token; uses the behaviour weight itself."""
    rows = tokens.rows
    log_ratio_T = tokens.log_ratio_T.detach().clamp(-_LOG_W_MAX, _LOG_W_MAX)
    log_weight_T = tokens.weight_T.log().clamp(_LOG_W_MIN, _LOG_W_MAX)
    log_W_R = rows.sum(torch.where(tokens.keep_T, log_ratio_T + log_weight_T, 0))
    log_W_T = rows.spread(log_W_R.clamp(_LOG_W_MIN, _LOG_W_MAX))
    up_T = tokens.advantages_T >= 0
    k_T = torch.where(up_T, config.k_pos, config.k_neg)
    lambda_T = torch.where(up_T, config.lambda_pos, config.lambda_neg).clamp(min=_LAMBDA_MIN)
    phi_T = (lambda_T + k_T * log_W_T - lambda_T * log_W_T.exp()).exp()
    return Surrogate(
        loss_T=-phi_T * tokens.advantages_T * tokens.logp_T,
        ratio_T=log_W_T.exp(),
        clipped_T=torch.zeros_like(tokens.mask_T),
        weighted=True,
        extra={"vespo_phi": phi_T},
    )
