"""How many of a run's tasks its policy solved while it trained: by stream and task type, collected from the log.

Over all versions that rolled out, so this tells where a stream stands between too easy and too hard; how the policy gets better
is what evaluation streams tell.
"""

from __future__ import annotations

from typing import Final

import msgspec

from schemas.messages.rollout import Trajectory
from schemas.messages.sampling import GroupIssued
from stages.clients.arena.wire import task_type
from stages.rewards.pass_at_k import PassAtK, TaskCount, summarize, usual_ks


class Solved(msgspec.Struct, frozen=True, kw_only=True):
    """One stream's tasks of one type."""

    stream: str
    task_type: str
    """The one `domain:` tag of its rows, else `unknown`."""
    num_groups: int
    """With at least one verdict."""
    num_rollouts: int
    """With a verdict: rejected ones are left out."""
    solved: float
    """Share of the rollouts."""
    pass_at_k: list[PassAtK]
    """Over groups: a task that was drawn twice counts twice."""


class SolvedGroup(msgspec.Struct, kw_only=True):
    """A group that trains, as far as it has ended."""

    key: tuple[str, str]
    """Stream and task type."""
    slots: set[int] = set()
    num_rollouts: int = 0
    num_solved: int = 0


class SolvedState(msgspec.Struct, kw_only=True):
    """Everything that was collected."""

    groups: dict[str, SolvedGroup] = {}
    settled: dict[tuple[str, str, int, int], int] = {}
    """(stream, task type, rollouts, solved) → groups that can't change any more."""
    num_slots: dict[tuple[str, str], int] = {}


class SolvedCounts:
    """Collects messages in the order of the log."""

    def __init__(self, state: SolvedState | None = None) -> None:
        self.state: Final = state or SolvedState()

    def take(self, message: msgspec.Struct) -> None:
        """One message; the first of a key counts."""
        state = self.state
        match message:
            case GroupIssued() if not message.evaluation:
                key = (message.stream, task_type(message.tags))
                state.groups.setdefault(message.group, SolvedGroup(key=key))
                state.num_slots[key] = max(state.num_slots.get(key, 0), message.num_slots)
            case Trajectory():
                group = state.groups.get(message.group)
                if group is not None and message.slot not in group.slots:
                    group.slots.add(message.slot)
                    group.num_rollouts += not message.rejected
                    group.num_solved += message.solved and not message.rejected
            case _:
                pass

    def settle(self, name: str) -> None:
        """All slots of a group have ended: only its counts are kept."""
        group = self.state.groups.pop(name, None)
        if group is not None and group.num_rollouts:
            key = (*group.key, group.num_rollouts, group.num_solved)
            self.state.settled[key] = self.state.settled.get(key, 0) + 1

    def results(self) -> list[Solved]:
        """By stream and task type."""
        counts: dict[tuple[str, str], list[TaskCount]] = {}
        for (stream, kind, rollouts, solved), number in sorted(self.state.settled.items()):
            count = TaskCount(num_rollouts=rollouts, num_solved=solved)
            counts.setdefault((stream, kind), []).extend([count] * number)
        for group in self.state.groups.values():
            if group.num_rollouts:
                count = TaskCount(num_rollouts=group.num_rollouts, num_solved=group.num_solved)
                counts.setdefault(group.key, []).append(count)
        return [
            Solved(
                stream=key[0],
                task_type=key[1],
                num_groups=len(found),
                num_rollouts=sum(count.num_rollouts for count in found),
                solved=sum(count.num_solved for count in found) / sum(count.num_rollouts for count in found),
                pass_at_k=summarize(found, usual_ks(self.state.num_slots[key])),
            )
            for key, found in sorted(counts.items())
        ]
