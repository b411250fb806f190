"""Advantage estimators that need no token values: one affine map per slot, from statistics over the slots that exist.

Every estimator gives a slot a `Line`; the advantage of the slot, of each of its rows and of each of its turns is that
line at its value. So a slot votes once however many rows it gave, and turns keep their own rewards. A group of one
has advantage 0 wherever the baseline is the group's. `gae` needs a critic's values: its line is the identity, the
trainer turns rewards into advantages.

    grpo                   (r - mean) / (std + eps)                          Shao et al. 2024
    dr_grpo                r - mean                                          Liu et al. 2025
    rloo                   r - mean of the others                            Ahmadian et al. 2024
    reinforce              r                                                 Williams 1992
    reinforce_pp_baseline  r - mean, then whitened over the batch's tokens   Hu et al. 2025
    opo                    r - mean weighted by answer length                Hao et al. 2025
    grpo_passk             best slot only: (best - second) / (std + eps)     Walder, Karkhanis 2025
    gpg                    (r - mean) · slots / slots with a reward          Chu et al. 2025
    max_rl                 (r - mean) / (mean + eps), 0 unless mean > 0      Tajwar et al. 2026
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import StrEnum
from itertools import chain
from typing import Final

import msgspec

from stages.assembly import moments
from stages.assembly.normalization import (
    IDENTITY,
    NO_SIGNAL,
    Groups,
    Level,
    Line,
    Normalization,
    normalization_lines,
)

WHITENING_EPS: Final = 1e-8
"""Added to the variance under the root, as the published method does."""


class Estimator(StrEnum):
    """How rewards become advantages."""

    GRPO = "grpo"
    DR_GRPO = "dr_grpo"
    RLOO = "rloo"
    REINFORCE = "reinforce"
    REINFORCE_PP_BASELINE = "reinforce_pp_baseline"
    OPO = "opo"
    GRPO_PASSK = "grpo_passk"
    GPG = "gpg"
    MAX_RL = "max_rl"
    GAE = "gae"


GROUP_ESTIMATORS: Final = frozenset(Estimator) - {Estimator.REINFORCE, Estimator.GAE}
"""Estimators whose baseline is the group's: they need at least two slots to say anything."""


class EstimatorSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Which estimator, and its constants."""

    name: Estimator = Estimator.GRPO
    ddof: int = 1
    eps: float = 1e-6
    divide_by_std: bool = True
    """grpo_passk only."""


def advantage_lines(
    groups: Groups, num_loss_tokens: Sequence[Sequence[int]], settings: EstimatorSettings
) -> list[list[Line]]:
    """The map of each slot from value to advantage.

    Args:
        groups: the values of the live slots, per group.
        num_loss_tokens: trained tokens of each slot, in the same shape (opo and whitening weigh by them).
        settings: the estimator.
    """
    eps, ddof = settings.eps, settings.ddof
    match settings.name:
        case Estimator.REINFORCE | Estimator.GAE:
            return [[IDENTITY] * len(group) for group in groups]
        case Estimator.GRPO:
            return _by_group(groups, Normalization(mean=Level.GROUP, std=Level.GROUP, ddof=ddof, eps=eps))
        case Estimator.DR_GRPO:
            return _by_group(groups, Normalization(mean=Level.GROUP))
        case Estimator.RLOO:
            return _by_group(groups, Normalization(mean=Level.GROUP, leave_one_out=True))
        case Estimator.REINFORCE_PP_BASELINE:
            return _whitened(groups, num_loss_tokens, _by_group(groups, Normalization(mean=Level.GROUP)))
        case Estimator.OPO:
            return [_opo(group, counts) for group, counts in zip(groups, num_loss_tokens, strict=True)]
        case Estimator.GRPO_PASSK:
            return [_passk(group, settings) for group in groups]
        case Estimator.GPG:
            return _gpg(groups)
        case Estimator.MAX_RL:
            return [_max_rl(group, eps) for group in groups]


def advantages(
    groups: Groups, num_loss_tokens: Sequence[Sequence[int]], settings: EstimatorSettings
) -> list[list[float]]:
    """The advantage of each slot."""
    lines = advantage_lines(groups, num_loss_tokens, settings)
    return [[line.at(value) for line, value in zip(*pair, strict=True)] for pair in zip(lines, groups, strict=True)]


def _by_group(groups: Groups, settings: Normalization) -> list[list[Line]]:
    lines = normalization_lines(groups, settings)
    return [line if len(group) > 1 else [NO_SIGNAL] for line, group in zip(lines, groups, strict=True)]


def whitening(values: Sequence[float], counts: Sequence[int]) -> Line:
    """Centres and scales to unbiased variance 1, each value standing `counts` times; values without spread map to 0."""
    if not moments.has_spread(values):
        return NO_SIGNAL
    centre = moments.weighted_mean(values, counts)
    return Line(centre, 1.0 / math.sqrt(moments.weighted_variance(values, counts, centre) + WHITENING_EPS))


def _whitened(groups: Groups, num_loss_tokens: Sequence[Sequence[int]], lines: list[list[Line]]) -> list[list[Line]]:
    """Whitened over all trained tokens of the batch, each slot counting its own. A group of one neither votes nor
    moves.
    """
    voters = [
        (line.at(value), count)
        for slots in zip(lines, groups, num_loss_tokens, strict=True)
        for line, value, count in zip(*slots, strict=True)
        if line.factor and count
    ]
    centre, scale = whitening([value for value, _ in voters], [count for _, count in voters])
    return [[Line(line.shift + centre, scale) if line.factor else NO_SIGNAL for line in group] for group in lines]


def _opo(values: Sequence[float], num_loss_tokens: Sequence[int]) -> list[Line]:
    if len(values) < 2 or sum(num_loss_tokens) == 0:
        return [NO_SIGNAL] * len(values)
    return [Line(moments.weighted_mean(values, num_loss_tokens), 1.0)] * len(values)


def _passk(values: Sequence[float], settings: EstimatorSettings) -> list[Line]:
    lines = [NO_SIGNAL] * len(values)
    if not moments.has_spread(values):
        return lines
    best = max(range(len(values)), key=values.__getitem__)
    second = max(value for index, value in enumerate(values) if index != best)
    centre = moments.mean(values)
    std = moments.deviation(values, [centre] * len(values), settings.ddof)
    lines[best] = Line(second, 1.0 / (std + settings.eps) if settings.divide_by_std else 1.0)
    return lines


def _gpg(groups: Groups) -> list[list[Line]]:
    values = list(chain(*groups))
    alpha = len(values) / max(1, sum(value != 0.0 for value in values))
    return [[Line(moments.mean(group), alpha)] * len(group) if len(group) > 1 else [NO_SIGNAL] for group in groups]


def _max_rl(values: Sequence[float], eps: float) -> list[Line]:
    centre = moments.mean(values)
    if len(values) < 2 or centre <= 0.0:
        return [NO_SIGNAL] * len(values)
    return [Line(centre, 1.0 / (centre + eps))] * len(values)
