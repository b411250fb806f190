"""pass@k with an interval, from how many of each task's rollouts solved it. Pure.

pass@k of a task with n rollouts, c of them solved, is the chance that at least one of k rollouts drawn without replacement
solved it: 1 - C(n-c, k) / C(n, k) (Chen et al. 2021, "Evaluating Large Language Models Trained on Code"). A stream's pass@k is
the mean over its tasks. The interval is Wilson's at the effective number of tasks: tasks, not rollouts, are the independent
draws, and a spread between tasks below that of a coin counts as more tasks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import Final

import msgspec

CONFIDENCE: Final = 0.95


class TaskCount(msgspec.Struct, frozen=True, kw_only=True):
    """One task's rollouts."""

    num_rollouts: int
    """Those with a verdict: rejected ones are left out."""
    num_solved: int


class PassAtK(msgspec.Struct, frozen=True, kw_only=True):
    """One pass@k."""

    k: int
    value: float
    low: float
    """Lower end of the 95 % interval."""
    high: float
    num_tasks: int
    """Tasks with at least k rollouts: the others have no pass@k."""


def pass_at_k(count: TaskCount, k: int) -> float:
    """The unbiased estimate of one task, for 1 <= k <= its rollouts."""
    failed = count.num_rollouts - count.num_solved
    return 1.0 - math.comb(failed, k) / math.comb(count.num_rollouts, k)


def summarize(counts: Sequence[TaskCount], ks: Sequence[int]) -> list[PassAtK]:
    """pass@k over tasks, for each k that at least one task has rollouts for."""
    found: list[PassAtK] = []
    for k in ks:
        values = [pass_at_k(count, k) for count in counts if count.num_rollouts >= k]
        if values:
            mean = math.fsum(values) / len(values)
            low, high = interval(values)
            found.append(PassAtK(k=k, value=mean, low=low, high=high, num_tasks=len(values)))
    return found


def interval(values: Sequence[float], confidence: float = CONFIDENCE) -> tuple[float, float]:
    """The interval of the mean of independent values in [0, 1]; at least one value.

    Returns:
        (low, high), with 0 <= low <= mean <= high <= 1.
    """
    number = len(values)
    mean = math.fsum(values) / number
    squares = math.fsum((value - mean) ** 2 for value in values)
    coin = mean * (1.0 - mean)
    # No fewer tasks than there are; more where they differ less than the results of a coin would.
    effective = float(number) if squares <= 0 or coin <= 0 else max(number, coin * number * number / squares)
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    denominator = 1.0 + z * z / effective
    centre = (mean + z * z / (2 * effective)) / denominator
    half = z * math.sqrt(coin / effective + z * z / (4 * effective * effective)) / denominator
    return max(0.0, min(mean, centre - half)), min(1.0, max(mean, centre + half))


def usual_ks(num_slots: int) -> list[int]:
    """1, 2, 4, … up to the rollouts of a task, and their number itself."""
    ks = [1 << power for power in range(num_slots.bit_length()) if 1 << power <= num_slots]
    return ks if ks[-1] == num_slots else [*ks, num_slots]
