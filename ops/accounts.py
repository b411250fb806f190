"""What became of everything that a run issued: an own scan of the log, independent of every fold.

Each issued group ends in exactly one of trained / dropped(reason) / open. `open` needs a reason of its own: a slot that
has not ended, a closed group that waits for a step, or an end that assembly has not read yet. Anything else is unexplained, and that is a bug.
"""

from __future__ import annotations

from collections import Counter
from typing import Final

import msgspec

from broker.api import Broker
from ops.evaluations import Evaluation, Evaluations
from ops.solved import Solved, SolvedCounts
from pipeline.log import RunLog
from schemas.messages.rollout import EpisodeEnded, EpisodeLaunched, Trajectory
from schemas.messages.sampling import DeadLetter, EpisodeRequested, GroupClosed, GroupIssued
from schemas.messages.training import FoldCheckpoint, StepAssembled, StepTrained
from schemas.topics import (
    DEAD_LETTER,
    EPISODE_ENDED,
    EPISODE_LAUNCHED,
    EPISODE_REQUESTED,
    GROUP_CLOSED,
    GROUP_ISSUED,
    STEP_ASSEMBLED,
    STEP_TRAINED,
    STREAM_LISTED,
    TRAJECTORY_READY,
)

_TOPICS: Final = (
    STREAM_LISTED,
    GROUP_ISSUED,
    EPISODE_REQUESTED,
    EPISODE_LAUNCHED,
    EPISODE_ENDED,
    TRAJECTORY_READY,
    GROUP_CLOSED,
    STEP_ASSEMBLED,
    STEP_TRAINED,
    DEAD_LETTER,
)


class GroupCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Issued = trained + dropped + open + unexplained."""

    issued: int
    trained: int
    dropped: int
    open: int


class EpisodeCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Attempts at slots."""

    requested: int
    ended: int
    rejected: int
    """Slots that ended as rejected."""


class Staleness(msgspec.Struct, frozen=True, kw_only=True):
    """In versions, over all trained rows."""

    max: int
    bound: int | None
    """None: rows of another run, without a bound."""


class RunAccount(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a run, as `headrace run --json` prints it."""

    run: str
    steps: int
    """Trained steps."""
    reward_by_step: list[float]
    groups: GroupCounts
    episodes: EpisodeCounts
    dead_letters: int
    staleness: Staleness
    trained_rows: int
    unexplained: int
    unexplained_groups: list[str] = []
    doubled: int = 0
    """Groups that ended in more than one way or were assembled twice."""
    dropped_by_reason: dict[str, int] = {}
    classes: dict[str, int] = {}
    """Episode ends by class."""
    groups_by_stream: dict[str, int] = {}
    """Issued groups."""
    extra_launches: int = 0
    """Launches that were repeated with a new session, since the answer to one in flight was lost."""
    registrations_left: int | None = None
    """The run's registrations that still stand in the Arena at its end; None where nobody looked."""
    evaluations: list[Evaluation] = []
    """By stream and version; their groups are among the dropped ones, with the reason `evaluation`."""
    solved: list[Solved] = []
    """Of the groups that train, by stream and task type."""
    seconds: float = 0.0


class _Group:
    __slots__ = ("closed", "dropped", "last_sequence", "num_slots", "slots", "steps")

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.slots: set[int] = set()
        self.closed: GroupClosed | None = None
        self.steps: list[int] = []
        self.dropped = ""
        self.last_sequence = 0
        """Where its latest trajectory stands."""


class Account:
    """Collects messages in the order of the log; `result` says what they amount to."""

    def __init__(self, run: str, *, staleness_bound: int | None) -> None:
        self.run: Final = run
        self._bound: Final = staleness_bound
        self._groups: Final[dict[str, _Group]] = {}
        self._strangers: Final[set[str]] = set()
        """Groups that are spoken of and were never issued."""
        self._assembled: Final[dict[int, StepAssembled]] = {}
        self._trained: Final[dict[int, StepTrained]] = {}
        self._requested = 0
        self._ended = 0
        self._rejected = 0
        self._dead = 0
        self._classes: Final[Counter[str]] = Counter()
        self._streams: Final[Counter[str]] = Counter()
        self._extra_launches = 0
        self._evaluations: Final = Evaluations()
        self._solved: Final = SolvedCounts()

    def take(self, message: msgspec.Struct, sequence: int) -> None:
        """One message of the log, with its place there."""
        self._evaluations.take(message)
        self._solved.take(message)
        match message:
            case GroupIssued():
                self._groups.setdefault(message.group, _Group(message.num_slots))
                self._streams[message.stream] += 1
            case EpisodeLaunched():
                self._extra_launches += message.launch_try > 0
            case EpisodeRequested():
                self._requested += 1
            case EpisodeEnded():
                self._ended += 1
                self._classes[message.outcome.value] += 1
            case Trajectory():
                self._rejected += message.rejected
                if (group := self._group(message.group)) is not None:
                    group.slots.add(message.slot)
                    group.last_sequence = sequence
            case GroupClosed():
                if (group := self._group(message.group)) is not None:
                    group.closed = message
            case StepAssembled():
                self._take_step(message)
            case StepTrained():
                self._trained.setdefault(message.step, message)
            case DeadLetter():
                self._dead += 1
            case _:
                pass

    def _group(self, name: str) -> _Group | None:
        group = self._groups.get(name)
        if group is None:
            self._strangers.add(name)
        return group

    def _take_step(self, step: StepAssembled) -> None:
        if step.step in self._assembled:
            return
        self._assembled[step.step] = step
        for name in step.groups:
            if (group := self._group(name)) is not None:
                group.steps.append(step.step)
        for dropped in step.dropped:
            if (group := self._group(dropped.group)) is not None:
                group.dropped = dropped.reason

    def result(self, *, folded_up_to: int, seconds: float = 0.0) -> RunAccount:
        """The account of everything taken so far.

        Args:
            folded_up_to: sequence up to which assembly has read the log: what ended after it is open, since it will be
                folded as soon as assembly goes on.
        """
        trained = dropped = open_groups = doubled = 0
        unexplained = sorted(self._strangers)
        reasons: Counter[str] = Counter()
        for name, group in self._groups.items():
            reason = group.dropped or ("" if group.closed is None or group.closed.usable else group.closed.reason)
            done = [step for step in group.steps if step in self._trained]
            if len(group.steps) + bool(reason) > 1:
                doubled += 1
            if done:
                trained += 1
            elif reason:
                dropped += 1
                reasons[reason.split(":", 1)[0]] += 1
            elif group.closed is not None or len(group.slots) < group.num_slots or group.last_sequence > folded_up_to:
                open_groups += 1
            else:
                unexplained.append(name)
        steps = sorted(self._trained)
        assembled = [self._assembled[step] for step in steps if step in self._assembled]
        return RunAccount(
            run=self.run,
            steps=len(steps),
            reward_by_step=[round(step.mean_reward, 6) for step in assembled],
            groups=GroupCounts(issued=len(self._groups), trained=trained, dropped=dropped, open=open_groups),
            episodes=EpisodeCounts(requested=self._requested, ended=self._ended, rejected=self._rejected),
            dead_letters=self._dead,
            staleness=Staleness(
                max=max((step.step - 1 - step.min_version for step in assembled), default=0), bound=self._bound
            ),
            trained_rows=sum(step.num_rows for step in assembled),
            unexplained=len(unexplained),
            unexplained_groups=unexplained[:50],
            doubled=doubled,
            dropped_by_reason=dict(sorted(reasons.items())),
            classes=dict(sorted(self._classes.items())),
            groups_by_stream=dict(sorted(self._streams.items())),
            extra_launches=self._extra_launches,
            evaluations=self._evaluations.results(),
            solved=self._solved.results(),
            seconds=round(seconds, 3),
        )


async def account(broker: Broker, *, staleness_bound: int | None, seconds: float = 0.0) -> RunAccount:
    """Scan a run's whole log, as it stands now."""
    collected = Account(broker.run, staleness_bound=staleness_bound)
    async with RunLog(broker).read(_TOPICS, follow=False) as entries:
        async for entry in entries:
            collected.take(entry.message, entry.sequence)
    found = await broker.load_state("fold.assembly")
    folded_up_to = 0 if found is None else msgspec.msgpack.decode(found[0], type=FoldCheckpoint).sequence
    return collected.result(folded_up_to=folded_up_to, seconds=seconds)
