"""Statistics of a step: sums with their counts while it runs, global means at its end."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from stages.learning.losses.batch import LossBatch, Stat
from stages.training.ranks import Ranks


class Tally:
    """Adds up (total, count) pairs of micro-batches, and maxima."""

    def __init__(self) -> None:
        self._sums: dict[str, tuple[float, float]] = {}
        self._maxima: dict[str, float] = {}

    def add(self, stats: dict[str, Stat]) -> None:
        """One micro-batch's sums, read from the device in one go."""
        if not stats:
            return
        flat = torch.stack([x.double() for stat in stats.values() for x in (stat.total, stat.count)]).tolist()
        for i, name in enumerate(stats):
            self.count(name, flat[2 * i], flat[2 * i + 1])

    def count(self, name: str, total: float, count: float) -> None:
        """One sum with its count; with counts of 0 the sum itself is reported."""
        before = self._sums.get(name, (0.0, 0.0))
        self._sums[name] = (before[0] + total, before[1] + count)

    def include(self, other: Tally) -> None:
        """What another tally of this rank counted."""
        sums, maxima = other.counted
        for name, (total, count) in sums.items():
            self.count(name, total, count)
        for name, value in maxima.items():
            self.peak(name, value)

    def peak(self, name: str, value: float) -> None:
        """A maximum."""
        self._maxima[name] = max(value, self._maxima.get(name, -math.inf))

    @property
    def counted(self) -> tuple[dict[str, tuple[float, float]], dict[str, float]]:
        """Everything so far: sums and maxima."""
        return self._sums, self._maxima

    def take_over(self, counted: tuple[dict[str, tuple[float, float]], dict[str, float]]) -> None:
        """What another rank counted, in place of what this one did."""
        self._sums, self._maxima = counted

    def means(self, ranks: Ranks) -> dict[str, float]:
        """Global means and maxima, by name; collective."""
        sums = ranks.sum_counts(self._sums)
        found = {name: total / count if count else total for name, (total, count) in sums.items()}
        gathered = ranks.sum_counts({f"{name}@{ranks.rank}": (value, 1.0) for name, value in self._maxima.items()})
        for key, (value, _) in gathered.items():
            name = key.rsplit("@", 1)[0]
            found[name] = max(value, found.get(name, -math.inf))
        return found


def mismatch(logp_T: Tensor, batch: LossBatch) -> tuple[dict[str, Stat], float]:
    """How far the engine's log-probs are from the trainer's where both used the same weights.

    Before the step's first update, on the tokens that the version it starts from sampled: with exact numerics it is 0. Means of
    k3 = exp(d) - 1 - d and of |d|, and the largest |d|, with d = trainer - engine.
    """
    if batch.versions_T is None or batch.current_version is None:
        return {}, 0.0
    same_T = batch.loss_mask_T & (batch.versions_T == batch.current_version - 1)
    d_N = (logp_T.detach() - batch.old_logp_T)[same_T].double()
    if not d_N.numel():
        return {}, 0.0
    count = torch.tensor(float(d_N.numel()))
    stats = {
        "mismatch/kl": Stat(total=(d_N.exp() - 1 - d_N).sum(), count=count),
        "mismatch/abs": Stat(total=d_N.abs().sum(), count=count),
    }
    return stats, float(d_N.abs().max())
