"""DRO: a policy gradient held near the anchor policy by a quadratic penalty. Richemond et al. 2024 (arXiv:2405.19107).

ℓ = −A·log πθ + (β/2)·(log πθ − log πprox)².
"""

import msgspec
import torch

from stages.learning.losses.batch import Surrogate, Tokens
from stages.learning.losses.checks import above


class Dro(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="dro"):
    """Policy gradient with a squared log-ratio penalty."""

    beta: float

    def __post_init__(self) -> None:
        above(self.beta, 0, "beta")


def dro(tokens: Tokens, config: Dro) -> Surrogate:
    """The penalised log-prob of each token."""
    log_ratio_T = tokens.log_ratio_T
    loss_T = -tokens.advantages_T * tokens.logp_T + config.beta / 2 * log_ratio_T.square()
    ratio_T = tokens.ratio(log_ratio_T.detach())
    return Surrogate(loss_T=loss_T, ratio_T=ratio_T, clipped_T=torch.zeros_like(tokens.mask_T))
