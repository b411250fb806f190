"""Losses without a ratio of their own: REINFORCE (Williams 1992), and plain maximum likelihood for supervised tokens.

REINFORCE: ℓ = −A·log πθ (off-policy data: add a behaviour weight). Likelihood: ℓ = −log πθ.
"""

import msgspec
import torch

from stages.learning.losses.batch import Surrogate, Tokens


class Reinforce(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="reinforce"
):
    """The score-function gradient."""


class Likelihood(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="likelihood"
):
    """Cross-entropy of the tokens; advantages are not read."""


def reinforce(tokens: Tokens) -> Surrogate:
    """The weighted log-prob of each token."""
    return _surrogate(tokens, -tokens.advantages_T * tokens.logp_T)


def likelihood(tokens: Tokens) -> Surrogate:
    """The negative log-prob of each token."""
    return _surrogate(tokens, -tokens.logp_T)


def _surrogate(tokens: Tokens, loss_T: torch.Tensor) -> Surrogate:
    ratio_T = tokens.ratio(tokens.log_ratio_T.detach())
    return Surrogate(loss_T=loss_T, ratio_T=ratio_T, clipped_T=torch.zeros_like(tokens.mask_T))
