"""Normalisation of advantages over tokens, after the parts that assembly can't know (critic, KL reward).

y = (x − μ)/(σ + eps), μ and σ each over all trained tokens of the mini-batch, over those of the token's group, or left out. σ is the
root mean square of x − μ around whatever μ is in use. Sums are reduced over ranks by an injected function, in float64.
Only active rows (with a trained token) count. A group with one active row is a singleton: its leave-one-out is 0, its std 1. No spread of a
set that is both centred and scaled, no advantage.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import msgspec
import torch
from torch import Tensor

from stages.learning.losses.checks import at_least, choice
from stages.learning.losses.errors import LossConfigError
from stages.learning.rows import Rows

Level = Literal["none", "batch", "group"]
Reduce = Callable[[Tensor], Tensor]
"""Sums a tensor elementwise over all ranks. Collective: every rank calls it equally often, with the same shape."""

# Spread at or below this share of the largest value is rounding noise, not signal (the same rule as for rewards).
_NO_SPREAD = 1e-9


class TokenNormalisation(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which statistics normalise the advantages."""

    mean: Level = "batch"
    std: Level = "batch"
    leave_one_out: bool = False
    """Each token's mean is that of the others in its set."""
    ddof: int = 1
    """0: population, 1: sample. A set of one token has std 1."""
    eps: float = 1e-5
    eps_in_variance: bool = False
    """True: (x − μ)/√(σ² + eps) instead of (x − μ)/(σ + eps)."""

    def __post_init__(self) -> None:
        choice(self.mean, Level, "normalisation.mean")
        choice(self.std, Level, "normalisation.std")
        at_least(self.eps, 0, "normalisation.eps")
        if self.ddof not in {0, 1}:
            raise LossConfigError(f"normalisation.ddof is {self.ddof}, expected 0 (population) or 1 (sample)")
        if self.leave_one_out and self.mean == "none":
            raise LossConfigError("normalisation.leave_one_out needs a mean: batch or group")


def one_rank(x: Tensor) -> Tensor:
    """`Reduce` of a trainer with one rank."""
    return x


def normalise(
    x_T: Tensor,
    mask_T: Tensor,
    rows: Rows,
    config: TokenNormalisation,
    *,
    group_R: Tensor,
    num_groups: int,
    reduce: Reduce = one_rank,
) -> Tensor:
    """Normalised values, 0 outside the mask: [T], in x's dtype.

    Args:
        x_T: advantages.
        mask_T: bool, trained tokens.
        rows: this rank's rows.
        config: which statistics.
        group_R: int64 index of each row's group, the same numbering on all ranks.
        num_groups: groups of the mini-batch over all ranks.
        reduce: the sum over ranks.
    """
    token_group_T = rows.spread(group_R)
    exact_T = torch.where(mask_T, x_T, 0).double()
    count_G = reduce(_by_group(mask_T.double(), token_group_T, num_groups))
    active_G = reduce(_by_group((rows.count(mask_T) > 0).double(), group_R, num_groups))
    sets = _Sets(token_group_T=token_group_T, num_groups=num_groups, mask_T=mask_T, reduce=reduce, count_G=count_G)
    centred_T = exact_T
    if config.mean != "none":
        centred_T = exact_T - _means(exact_T, sets, active_G, config)
    if config.std == "none":
        return torch.where(mask_T, centred_T, 0).to(x_T.dtype)
    count_T = sets.count(config.std)
    square_T = sets.total(centred_T.square(), config.std)
    single_T = (count_T <= config.ddof) | ((active_G[token_group_T] <= 1) if config.std == "group" else False)
    variance_T = torch.where(single_T, 1, square_T / (count_T - config.ddof).clamp(min=1))
    scale_T = (variance_T + config.eps).sqrt() if config.eps_in_variance else variance_T.sqrt() + config.eps
    largest_T = sets.total(exact_T.abs(), config.std)  # at least the largest |x|: a bound of its rounding noise
    flat_T = (square_T <= (_NO_SPREAD * largest_T.clamp(min=1)).square()) & (config.mean == config.std)
    return torch.where(mask_T & ~flat_T, centred_T / scale_T, 0).to(x_T.dtype)


@dataclass(frozen=True, kw_only=True)
class _Sets:
    """Sums over the set that a token belongs to."""

    token_group_T: Tensor
    num_groups: int
    mask_T: Tensor
    reduce: Reduce
    count_G: Tensor

    def total(self, value_T: Tensor, level: Level) -> Tensor:
        value_G = self.reduce(_by_group(torch.where(self.mask_T, value_T, 0), self.token_group_T, self.num_groups))
        return self._spread(value_G, level)

    def count(self, level: Level) -> Tensor:
        return self._spread(self.count_G, level)

    def _spread(self, value_G: Tensor, level: Level) -> Tensor:
        return value_G[self.token_group_T] if level == "group" else value_G.sum().expand(self.token_group_T.shape)


def _means(x_T: Tensor, sets: _Sets, active_G: Tensor, config: TokenNormalisation) -> Tensor:
    total_T, count_T = sets.total(x_T, config.mean), sets.count(config.mean)
    if not config.leave_one_out:
        return total_T / count_T.clamp(min=1)
    others_T = (total_T - x_T) / (count_T - 1).clamp(min=1)
    alone_T = count_T <= 1
    if config.mean == "group":
        alone_T = alone_T | (active_G[sets.token_group_T] <= 1)
    return torch.where(alone_T, x_T, others_T)


def _by_group(value: Tensor, index: Tensor, num_groups: int) -> Tensor:
    return value.new_zeros(num_groups).index_add(0, index, value)
