"""Means and deviations of sets of rewards: exact under any order, honest about sets of one and sets without spread.

Sums are `math.fsum` (correctly rounded, so the order of arrival can't show). Spread is decided by max - min of the
values themselves, never by a computed deviation: rounding residue of a constant set must not be divided by. Knows no
group and no message.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

SPREAD_TOLERANCE: Final = 1e-9
"""Relative width below which a set counts as constant: far above float64 rounding, far below any reward step."""
SINGLETON_STD: Final = 1.0
"""A set of one has no deviation of its own: dividing by 1 leaves its difference as it is."""


def has_spread(values: Sequence[float]) -> bool:
    """Whether max - min exceeds 1e-9 · max(1, |max|)."""
    if len(values) < 2:
        return False
    high = max(values)
    return high - min(values) > SPREAD_TOLERANCE * max(1.0, abs(high))


def mean(values: Sequence[float]) -> float:
    """Mean of a non-empty set; of a constant set that very constant."""
    if min(values) == max(values):
        return values[0]
    return math.fsum(values) / len(values)


def leave_one_out_means(values: Sequence[float]) -> list[float]:
    """For each member the mean of the others; a set of one keeps its own value, so that its difference is 0."""
    if min(values) == max(values):
        return list(values)
    total, others = math.fsum(values), len(values) - 1
    return [(total - value) / others for value in values]


def deviation(values: Sequence[float], centres: Sequence[float], ddof: int) -> float:
    """Root mean square of values - centres over n - ddof; 1 for a set of one."""
    if len(values) == 1:
        return SINGLETON_STD
    squares = math.fsum(_square(value - centre) for value, centre in zip(values, centres, strict=True))
    return math.sqrt(squares / (len(values) - ddof))


def leave_one_out_deviations(values: Sequence[float], ddof: int) -> list[float | None]:
    """For each member the deviation of the others around their own mean; None where the others have no spread."""
    found: list[float | None] = []
    for index in range(len(values)):
        others = [*values[:index], *values[index + 1 :]]
        if not has_spread(others):
            found.append(None)
        else:
            found.append(deviation(others, [mean(others)] * len(others), ddof))
    return found


def weighted_mean(values: Sequence[float], counts: Sequence[int]) -> float:
    """Mean in which each value stands `counts` times."""
    return math.fsum(value * count for value, count in zip(values, counts, strict=True)) / sum(counts)


def weighted_variance(values: Sequence[float], counts: Sequence[int], centre: float) -> float:
    """Unbiased variance around `centre` in which each value stands `counts` times; 0 below two."""
    total = sum(counts)
    if total < 2:
        return 0.0
    squares = math.fsum(count * _square(value - centre) for value, count in zip(values, counts, strict=True))
    return squares / (total - 1)


def _square(value: float) -> float:
    return value * value  # a power would be the C library's, which may differ in the last bit between machines
