"""When evaluation streams are run: pure. Overlapped with training, first when due, never a barrier.

An evaluation of version v asks every row of its stream for its rollouts by weights v or newer (training goes on meanwhile).
One that has not begun when the next is due is skipped, so that evaluations slower than training never pile up.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from schemas.messages.sampling import StreamRow


class EvaluationStream(msgspec.Struct, frozen=True, kw_only=True):
    """One stream and how often it is run."""

    name: str
    every_versions: int
    """Version 0, the policy before training, is the first."""
    slots: int
    """Rollouts of each row."""


class EvaluationState(msgspec.Struct, kw_only=True):
    """Where a stream's evaluations stand; checkpointed."""

    version: int = -1
    """The version whose evaluation was begun last; -1: none."""
    next_row: int = 0
    """Of that evaluation, the next row to issue."""
    due: int = -1
    """The newest version that is to be evaluated."""
    num_skipped: int = 0


class EvaluationPlan(msgspec.Struct, frozen=True, kw_only=True):
    """A stream with its state and its rows."""

    stream: EvaluationStream
    state: EvaluationState
    rows: Sequence[StreamRow]


def see_version(state: EvaluationState, stream: EvaluationStream, version: int) -> None:
    """Take note that a version exists."""
    state.due = max(state.due, version // stream.every_versions * stream.every_versions)


def next_row(plan: EvaluationPlan) -> StreamRow | None:
    """The next row to evaluate, taken; None while nothing is due."""
    state, stream = plan.state, plan.stream
    if state.version < 0 or state.next_row >= len(plan.rows):
        if state.due <= state.version:
            return None
        former = state.version if state.version >= 0 else -stream.every_versions
        state.num_skipped += (state.due - former) // stream.every_versions - 1
        state.version, state.next_row = state.due, 0
        if not plan.rows:
            return None
    state.next_row += 1
    return plan.rows[state.next_row - 1]


def most_at_once(max_concurrent_groups: int) -> int:
    """Evaluation groups under way at a time: training always keeps the other half."""
    return max(1, max_concurrent_groups // 2)
