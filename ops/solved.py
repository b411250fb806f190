"""How many of a run's tasks its policy solved while it trained: by stream and task type, collected from the log.

Over all versions that rolled out, so this tells where a stream stands between too easy and too hard; how the policy gets better
is what evaluation streams tell.
"""

from __future__ import annotations

from collections import Counter
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


class SolvedCounts:
    """Collects messages in the order of the log."""

    def __init__(self) -> None:
        self._types: Final[dict[str, tuple[str, str]]] = {}
        """Group that trains → its stream and task type."""
        self._slots: Final[set[tuple[str, int]]] = set()
        self._verdicts: Final[Counter[str]] = Counter()
        self._solved: Final[Counter[str]] = Counter()
        self._num_slots: Final[Counter[tuple[str, str]]] = Counter()

    def take(self, message: msgspec.Struct) -> None:
        """One message; the first of a key counts."""
        match message:
            case GroupIssued() if not message.evaluation:
                key = (message.stream, task_type(message.tags))
                self._types.setdefault(message.group, key)
                self._num_slots[key] = max(self._num_slots[key], message.num_slots)
            case Trajectory() if message.group in self._types and (message.group, message.slot) not in self._slots:
                self._slots.add((message.group, message.slot))
                self._verdicts[message.group] += not message.rejected
                self._solved[message.group] += message.solved and not message.rejected
            case _:
                pass

    def results(self) -> list[Solved]:
        """By stream and task type."""
        counts: dict[tuple[str, str], list[TaskCount]] = {}
        for group, key in self._types.items():
            if self._verdicts[group]:
                count = TaskCount(num_rollouts=self._verdicts[group], num_solved=self._solved[group])
                counts.setdefault(key, []).append(count)
        return [
            Solved(
                stream=key[0],
                task_type=key[1],
                num_groups=len(found),
                num_rollouts=sum(count.num_rollouts for count in found),
                solved=sum(count.num_solved for count in found) / sum(count.num_rollouts for count in found),
                pass_at_k=summarize(found, usual_ks(self._num_slots[key])),
            )
            for key, found in sorted(counts.items())
        ]
