"""What goes wrong, decided by a seeded plan; acting on it is the server's.

Each rule draws from a generator of its own, so that one rule's outcomes don't depend on how other calls interleave.
"""

from __future__ import annotations

import random
from typing import Generic, TypeVar

from ops.arena.config import CallFault, CallName, EpisodeFault, FaultPlan

Fault = TypeVar("Fault", CallFault, EpisodeFault)


class _Rule(Generic[Fault]):
    def __init__(self, fault: Fault, seed: str) -> None:
        self.fault = fault
        self._random = random.Random(seed)  # noqa: S311 - a reproducible plan, nothing secret
        self._seen = 0
        self._struck = 0

    def strikes(self) -> bool:
        """Count one matching event and say whether the fault happens to it."""
        self._seen += 1
        hit = self._random.random() < self.fault.probability
        if self._seen <= self.fault.skip or (self.fault.limit is not None and self._struck >= self.fault.limit):
            return False
        self._struck += hit
        return hit


class Faults:
    """A fault plan being played."""

    def __init__(self, plan: FaultPlan) -> None:
        self._calls = [_Rule(fault, f"{plan.seed}/call/{i}") for i, fault in enumerate(plan.calls)]
        self._episodes = [_Rule(fault, f"{plan.seed}/episode/{i}") for i, fault in enumerate(plan.episodes)]
        self._collect_at = frozenset(plan.collect_after_launches)

    def of_call(self, call: CallName) -> list[CallFault]:
        """The faults that happen to this call; delays may come with one other."""
        return [rule.fault for rule in self._calls if rule.fault.call is call and rule.strikes()]

    def of_episode(self, stream_id: str) -> EpisodeFault | None:
        """The first fault that happens to this task."""
        for rule in self._episodes:
            if rule.fault.stream_id in ("", stream_id) and rule.strikes():
                return rule.fault
        return None

    def collects(self, launches: int) -> bool:
        """Whether the registrations are collected at this launch count."""
        return launches in self._collect_at
