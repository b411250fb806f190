"""What a chaos run gives."""

from __future__ import annotations

import msgspec


class Recovery(msgspec.Struct, frozen=True, kw_only=True):
    """After faults of one kind, where the next fault waited for it."""

    moving_s: float
    """The longest time from the fault's end to the next message of any work."""
    step_s: float
    """The longest time from the fault's end to the next trained step."""


class ChaosResult(msgspec.Struct, frozen=True, kw_only=True):
    """`unexplained`, `doubled`, `lost` and `refold_differs` must be 0."""

    seed: int
    num_faults: int
    nodes: int
    faults: dict[str, int]
    """By kind."""
    faults_by_target: dict[str, int]
    disk_full: str
    """What stands for a full disk: a small file system under the first node, or nothing."""
    unexplained: int
    """Groups, rows, steps and dead letters without a reason; processes left behind; runs that ended or stood still by themselves."""
    doubled: int
    lost: int
    """Slots without a result, answered calls, sessions' calls and steps that the log lacks."""
    refold_differs: int
    """Messages and payloads that folding the log again does not give byte for byte."""
    seconds: float
    """Of the faults alone, from the first to the recovery from the last."""
    total_seconds: float
    steps: int
    groups: int
    slots: int
    dropped_groups: int
    repeated_ends: int
    """Slots that two workers ended, each in an attempt of its own; one result counts."""
    messages: int
    answered_calls: int
    refused_calls: int
    dead_letters: int
    trainer_generations: int
    run_starts: int
    recovery: dict[str, Recovery]
    without_node_s: float = 0.0
    """The longest time from the death of one of three nodes to the next work, before it was back."""
    details: list[str] = []
    """What is counted above, in words (the first 100)."""

    @property
    def holds(self) -> bool:
        """Whether nothing is wrong."""
        return not (self.unexplained or self.doubled or self.lost or self.refold_differs)
