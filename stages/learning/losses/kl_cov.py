"""KL-Cov: a KL penalty on the few tokens whose log-prob varies most with the advantage, to slow entropy collapse. Cui et al. 2025 (arXiv:2505.22617).

ℓ = −A·r, + coef·|log r| on the `fraction` of the mini-batch's tokens with the largest (A − mean A)·(log π − mean log π).
The tokens are picked over the whole mini-batch of all ranks (`minibatch.prepare_minibatch`).
"""

import msgspec
import torch

from stages.learning.losses.batch import Surrogate, Tokens
from stages.learning.losses.checks import above, at_least
from stages.learning.losses.errors import LossConfigError, LossInputError


class KlCov(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="kl_cov"):
    """Unclipped surrogate with a penalty on selected tokens."""

    fraction: float = 2e-4
    """Share of the trained tokens that is penalised; at least one token."""
    coef: float = 1.0

    def __post_init__(self) -> None:
        above(self.fraction, 0, "fraction")
        at_least(self.coef, 0, "coef")
        if self.fraction > 1:
            raise LossConfigError(f"fraction is {self.fraction}, expected a share of the tokens, at most 1")


def kl_cov(tokens: Tokens, config: KlCov) -> Surrogate:
    """The surrogate of each token, with the penalty where it was selected."""
    if tokens.selected_T is None:
        raise LossInputError(
            "kl_cov needs its tokens picked over the mini-batch: call prepare_minibatch before the first micro-batch"
        )
    log_ratio_T = tokens.log_ratio_T
    ratio_T = tokens.ratio(log_ratio_T)
    penalty_T = torch.where(tokens.selected_T, config.coef * log_ratio_T.abs(), 0)
    loss_T = -tokens.advantages_T * ratio_T + penalty_T
    return Surrogate(loss_T=loss_T, ratio_T=ratio_T, clipped_T=tokens.selected_T)
