"""Reward normalisation: (value - mean) / (std + eps), each of mean and std over the batch, the group or nothing.

Every slot gets a `Line`, the affine map that its value, its rows' values and its turns' values go through: statistics
are taken over slots, one vote each, and the map is then applied to whatever the slot gave. Knows no message.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from itertools import chain, islice
from typing import Final, NamedTuple

import msgspec

from stages.assembly import moments


class Level(StrEnum):
    """The set over which a statistic is taken."""

    NONE = "none"
    BATCH = "batch"
    GROUP = "group"


class Normalization(msgspec.Struct, frozen=True, kw_only=True):
    """How values are normalised; the default leaves them as they are."""

    mean: Level = Level.NONE
    std: Level = Level.NONE
    leave_one_out: bool = False
    """Each slot's mean is that of the others."""
    leave_one_out_std: bool = False
    """Each slot's std is that of the others around their own mean; where they have no spread the difference is kept
    undivided.
    """
    std_around_own_mean: bool = False
    """The std is taken around the mean of its own set, even where the mean of another set (or none) is subtracted."""
    ddof: int = 1
    """0: population, 1: sample."""
    eps: float = 1e-6
    """Added to the std; not used when `std` is none."""


class Line(NamedTuple):
    """value → (value - shift) · factor."""

    shift: float
    factor: float

    def at(self, value: float) -> float:
        """The mapped value, never -0."""
        return (value - self.shift) * self.factor + 0.0


IDENTITY: Final = Line(0.0, 1.0)
NO_SIGNAL: Final = Line(0.0, 0.0)

Groups = Sequence[Sequence[float]]
"""One value per live slot, in groups; a group is never empty."""


def normalization_lines(groups: Groups, settings: Normalization) -> list[list[Line]]:
    """The map of each slot. A set over which both mean and std are taken and that has no spread maps to 0.

    Raises:
        ValueError: an empty group, or leave_one_out_std with another std than the group's.
    """
    _refuse_empty(groups)
    if settings.leave_one_out_std and settings.std is not Level.GROUP:
        raise ValueError(f"leave_one_out_std works within groups: expected std = group, found {settings.std}")
    means = _means(groups, settings)
    factors = _factors(groups, means, settings)
    live = [True] * len(groups)
    if settings.mean is settings.std is Level.GROUP:
        live = [moments.has_spread(group) for group in groups]
    elif settings.mean is settings.std is Level.BATCH:
        live = [moments.has_spread(list(chain(*groups)))] * len(groups)
    return [
        [Line(*pair) if live[g] else NO_SIGNAL for pair in zip(means[g], factors[g], strict=True)]
        for g in range(len(groups))
    ]


def normalize(groups: Groups, settings: Normalization) -> list[list[float]]:
    """The normalised value of each slot."""
    lines = normalization_lines(groups, settings)
    return [[line.at(value) for line, value in zip(*pair, strict=True)] for pair in zip(lines, groups, strict=True)]


def _means(groups: Groups, settings: Normalization) -> list[list[float]]:
    match settings.mean:
        case Level.NONE:
            return [[0.0] * len(group) for group in groups]
        case Level.GROUP:
            return [_set_means(group, settings) for group in groups]
        case Level.BATCH:
            flat = iter(_set_means(list(chain(*groups)), settings))
            return [list(islice(flat, len(group))) for group in groups]


def _set_means(values: Sequence[float], settings: Normalization) -> list[float]:
    if settings.leave_one_out:
        return moments.leave_one_out_means(values)
    return [moments.mean(values)] * len(values)


def _factors(groups: Groups, means: list[list[float]], settings: Normalization) -> list[list[float]]:
    match settings.std:
        case Level.NONE:
            return [[1.0] * len(group) for group in groups]
        case Level.BATCH:
            values = list(chain(*groups))
            std = moments.deviation(values, _centres(values, list(chain(*means)), settings), settings.ddof)
            return [[_inverse(std + settings.eps)] * len(group) for group in groups]
        case Level.GROUP if settings.leave_one_out_std:
            return [
                [
                    1.0 if std is None else _inverse(std + settings.eps)
                    for std in moments.leave_one_out_deviations(group, settings.ddof)
                ]
                for group in groups
            ]
        case Level.GROUP:
            return [
                [_inverse(moments.deviation(group, _centres(group, centres, settings), settings.ddof) + settings.eps)]
                * len(group)
                for group, centres in zip(groups, means, strict=True)
            ]


def _centres(values: Sequence[float], means: list[float], settings: Normalization) -> list[float]:
    return [moments.mean(values)] * len(values) if settings.std_around_own_mean else means


def _inverse(divisor: float) -> float:
    # Only eps = 0 with a std of 0 gets here: values that equal their centres, which stay 0.
    return 1.0 / divisor if divisor > 0.0 else 0.0


def _refuse_empty(groups: Groups) -> None:
    empty = [index for index, group in enumerate(groups) if not group]
    if empty:
        raise ValueError(f"a group needs at least one live slot: found none in the groups at {empty}; drop them first")
