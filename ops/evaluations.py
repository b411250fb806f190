"""What a run's evaluations amount to: pass@k by stream and version, collected from the log.

An evaluation of version v is every row of its stream, rolled out by weights v or newer. Figures of one that is not complete say
so: they are over what has ended so far.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Coroutine
from typing import Any, Final

import msgspec

from pipeline.log import RunLog
from pipeline.metrics import Metrics
from schemas.messages.rollout import Trajectory
from schemas.messages.sampling import GroupClosed, GroupIssued, StreamListed
from schemas.topics import GROUP_CLOSED, GROUP_ISSUED, STREAM_LISTED, TRAJECTORY_READY
from stages.rewards.pass_at_k import PassAtK, TaskCount, summarize, usual_ks

EVALUATION_TOPICS: Final = (STREAM_LISTED, GROUP_ISSUED, TRAJECTORY_READY, GROUP_CLOSED)
GAUGE_PREFIX: Final = "evaluation."


class Evaluation(msgspec.Struct, frozen=True, kw_only=True):
    """One stream's evaluation of one version."""

    stream: str
    version: int
    complete: bool
    """Every row was issued and every one of its rollouts has ended."""
    num_tasks: int
    """Issued rows."""
    num_rollouts: int
    """With a verdict."""
    num_rejected: int
    """Without one: a failure that was not the model's. Left out of every figure."""
    mean_score: float | None
    """Of the raw scores; None without any."""
    pass_at_k: list[PassAtK]


class EvaluationTask(msgspec.Struct):
    """One issued row."""

    stream: str
    version: int
    num_slots: int
    slots: dict[int, tuple[bool, float | None]] = {}
    """Slot → (solved, score); rejected ones have no score."""
    rejected: set[int] = set()
    closed: bool = False


class EvaluationsState(msgspec.Struct, kw_only=True):
    """Everything that was collected."""

    num_rows: dict[str, int] = {}
    tasks: dict[str, EvaluationTask] = {}


class Evaluations:
    """Collects messages in the order of the log; `results` says what they amount to."""

    def __init__(self, state: EvaluationsState | None = None) -> None:
        self.state: Final = state or EvaluationsState()
        self._num_rows: Final = self.state.num_rows
        self._tasks: Final = self.state.tasks

    def take(self, message: msgspec.Struct) -> bool:
        """One message; whether it changed a figure."""
        match message:
            case StreamListed():
                self._num_rows.setdefault(message.stream, message.num_rows)
            case GroupIssued() if message.evaluation:
                task = EvaluationTask(stream=message.stream, version=message.min_version, num_slots=message.num_slots)
                self._tasks.setdefault(message.group, task)
            case Trajectory() if message.evaluation:
                return self._take_trajectory(message)
            case GroupClosed() if message.evaluation and message.group in self._tasks:
                self._tasks[message.group].closed = True
                return True
            case _:
                pass
        return False

    def results(self) -> list[Evaluation]:
        """All evaluations, by stream and version."""
        found: dict[tuple[str, int], list[EvaluationTask]] = {}
        for task in self._tasks.values():
            found.setdefault((task.stream, task.version), []).append(task)
        return [self._result(stream, version, tasks) for (stream, version), tasks in sorted(found.items())]

    def latest(self) -> list[Evaluation]:
        """Of each stream the newest complete one."""
        newest = {found.stream: found for found in self.results() if found.complete}
        return list(newest.values())

    def _take_trajectory(self, trajectory: Trajectory) -> bool:
        task = self._tasks.get(trajectory.group)
        if task is None or task.closed or trajectory.slot in task.slots or trajectory.slot in task.rejected:
            return False
        if trajectory.rejected:
            task.rejected.add(trajectory.slot)
        else:
            # A failure of the model's own has no raw score and counts as 0.
            task.slots[trajectory.slot] = (trajectory.solved, trajectory.score or 0.0)
        return True

    def _result(self, stream: str, version: int, tasks: list[EvaluationTask]) -> Evaluation:
        counts = [
            TaskCount(num_rollouts=len(task.slots), num_solved=sum(solved for solved, _ in task.slots.values()))
            for task in tasks
            if task.slots
        ]
        scores = [score for task in tasks for _, score in task.slots.values() if score is not None]
        return Evaluation(
            stream=stream,
            version=version,
            complete=len(tasks) == self._num_rows.get(stream) and all(task.closed for task in tasks),
            num_tasks=len(tasks),
            num_rollouts=sum(count.num_rollouts for count in counts),
            num_rejected=sum(len(task.rejected) for task in tasks),
            mean_score=math.fsum(scores) / len(scores) if scores else None,
            pass_at_k=summarize(counts, usual_ks(max(task.num_slots for task in tasks))),
        )


def gauges(evaluations: list[Evaluation]) -> dict[str, float]:
    """Flat names for a worker's report: `evaluation.STREAM.pass@1`, `…_low`, `…_high`, and the version."""
    found: dict[str, float] = {}
    for evaluation in evaluations:
        prefix = f"{GAUGE_PREFIX}{evaluation.stream}"
        found[f"{prefix}.version"] = evaluation.version
        for one in evaluation.pass_at_k:
            found[f"{prefix}.pass@{one.k}"] = one.value
            found[f"{prefix}.pass@{one.k}_low"] = one.low
            found[f"{prefix}.pass@{one.k}_high"] = one.high
    return found


def following(log: RunLog, metrics: Metrics) -> Callable[[], Coroutine[Any, Any, None]]:  # Any: what a task takes
    """Keep the newest complete evaluation of each stream in a worker's report, for ever."""

    async def follow() -> None:
        collected = Evaluations()
        async with log.read(EVALUATION_TOPICS) as entries:
            async for entry in entries:
                if collected.take(entry.message) and isinstance(entry.message, GroupClosed):
                    metrics.gauges.update(gauges(collected.latest()))

    return follow
