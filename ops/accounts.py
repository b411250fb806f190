"""What became of everything that a run issued: an own scan of the log, independent of every fold.

Each issued group ends in exactly one of trained / dropped(reason) / open. `open` needs a reason of its own: a slot that
has not ended, a closed group that waits for a step, or an end that assembly has not read yet. Anything else is unexplained, and that is a bug.
"""

from __future__ import annotations

from typing import Final

import msgspec

from broker.api import Broker
from broker.errors import PayloadMissingError
from ops.evaluations import Evaluations
from ops.run_account import (
    AccountState,
    EpisodeCounts,
    GroupAccount,
    GroupCounts,
    HarnessClasses,
    RunAccount,
    Staleness,
    StepAccount,
)
from ops.solved import SolvedCounts
from pipeline.generations import Generations
from pipeline.log import RunLog
from schemas.ids import group_ordinal
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

LEDGER_KEY: Final = "account"
"""Last value: the account of what was purged, as a FoldCheckpoint."""
ACCOUNT_TOPICS: Final = (
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


class Account:
    """Collects messages in the order of the log; `result` says what they amount to."""

    def __init__(self, run: str, *, staleness_bound: int | None, state: AccountState | None = None) -> None:
        self.run: Final = run
        self.state: Final = state or AccountState()
        self._bound: Final = staleness_bound
        self._generations: Final = Generations(self.state.generation)
        self._evaluations: Final = Evaluations(self.state.evaluations)
        self._solved: Final = SolvedCounts(self.state.solved)

    def take(self, message: msgspec.Struct, sequence: int) -> None:
        """One message of the log, with its place there."""
        state = self.state
        self._evaluations.take(message)
        self._solved.take(message)
        match message:
            case GroupIssued():
                self._issue(message)
            case EpisodeLaunched():
                state.extra_launches += message.launch_try > 0
            case EpisodeRequested():
                state.requested += 1
            case EpisodeEnded():
                state.ended += 1
                _count(state.classes, message.outcome.value)
                by_harness = state.classes_by_harness.setdefault((message.stream, message.harness), {})
                _count(by_harness, message.outcome.value)
            case Trajectory():
                self._end_slot(message, sequence)
            case GroupClosed():
                self._close(message)
            case StepAssembled():
                self._assemble(message)
            case StepTrained() if self._generations.admits(message.generation):
                state.generation = self._generations.newest
                self._train(message.step)
            case DeadLetter():
                state.dead += 1
            case _:
                pass

    def _end_slot(self, trajectory: Trajectory, sequence: int) -> None:
        self.state.rejected += trajectory.rejected
        if (group := self._group(trajectory.group)) is not None:
            group.slots.add(trajectory.slot)
            group.last_sequence = sequence
            self._settle(trajectory.group)

    def _close(self, closed: GroupClosed) -> None:
        if (group := self._group(closed.group)) is not None:
            group.closed = True
            group.evaluation = closed.evaluation
            group.reason = group.reason or ("" if closed.usable else closed.reason)
            self._settle(closed.group)

    def _issue(self, issued: GroupIssued) -> None:
        state = self.state
        if issued.group in state.groups or self._is_settled(issued.ordinal):
            return
        state.groups[issued.group] = GroupAccount(ordinal=issued.ordinal, num_slots=issued.num_slots)
        state.num_issued += 1
        _count(state.streams, issued.stream)

    def _is_settled(self, ordinal: int) -> bool:
        return ordinal < self.state.settled_below or ordinal in self.state.settled_above

    def _group(self, name: str, *, again: bool = False) -> GroupAccount | None:
        """A group that is not settled. `again`: being spoken of once more, a settled one has two ends."""
        group = self.state.groups.get(name)
        if group is None:
            ordinal = group_ordinal(name)
            settled = name in self.state.settled_names if ordinal is None else self._is_settled(ordinal)
            if not settled:
                self.state.strangers.add(name)
            elif again:
                self.state.doubled += 1
        return group

    def _assemble(self, step: StepAssembled) -> None:
        state = self.state
        if step.step in state.assembled or step.step in state.rewards:
            return
        state.assembled[step.step] = StepAccount(
            groups=list(step.groups), mean_reward=step.mean_reward, min_version=step.min_version, num_rows=step.num_rows
        )
        for name in step.groups:
            if (group := self._group(name, again=True)) is not None:
                group.steps.append(step.step)
        for dropped in step.dropped:
            if (group := self._group(dropped.group, again=True)) is not None:
                group.reason = dropped.reason
                self._settle(dropped.group, told=True)
        if step.step in state.trained:
            self._train(step.step)

    def _train(self, number: int) -> None:
        state = self.state
        step = state.assembled.pop(number, None)
        if step is None:
            if number not in state.rewards:
                state.trained.add(number)
            return
        state.trained.discard(number)
        state.rewards[number] = round(step.mean_reward, 6)
        state.trained_rows += step.num_rows
        state.staleness = max(state.staleness, number - 1 - step.min_version)
        for name in step.groups:
            self._settle(name)

    def _settle(self, name: str, *, told: bool = False) -> None:
        """Only count a group whose end is final. A dropped one is spoken of once more, by the step after it (`told`)."""
        state = self.state
        group = state.groups.get(name)
        if group is None or len(group.slots) < group.num_slots:
            return
        if not (self._is_trained(group) or told or (group.evaluation and group.closed)):
            return
        del state.groups[name]
        self._solved.settle(name)
        if group_ordinal(name) is None:
            state.settled_names.add(name)
        state.settled_above.add(group.ordinal)
        while state.settled_below in state.settled_above:
            state.settled_above.remove(state.settled_below)
            state.settled_below += 1
        state.doubled += len(group.steps) + bool(group.reason) > 1
        if self._is_trained(group):
            state.num_trained += 1
        else:
            state.num_dropped += 1
            _count(state.reasons, group.reason.split(":", 1)[0])

    def _is_trained(self, group: GroupAccount) -> bool:
        return any(step in self.state.rewards or step in self.state.trained for step in group.steps)

    def result(self, *, folded_up_to: int, seconds: float = 0.0) -> RunAccount:
        """The account of everything taken so far.

        Args:
            folded_up_to: sequence up to which assembly has read the log: what ended after it is open, since it will be
                folded as soon as assembly goes on.
            seconds: how long the run took.
        """
        state = self.state
        trained, dropped, doubled, open_groups = state.num_trained, state.num_dropped, state.doubled, 0
        unexplained = sorted(state.strangers)
        reasons = dict(state.reasons)
        for name, group in state.groups.items():
            doubled += len(group.steps) + bool(group.reason) > 1
            if self._is_trained(group):
                trained += 1
            elif group.reason:
                dropped += 1
                _count(reasons, group.reason.split(":", 1)[0])
            elif group.closed or len(group.slots) < group.num_slots or group.last_sequence > folded_up_to:
                open_groups += 1
            else:
                unexplained.append(name)
        return RunAccount(
            run=self.run,
            steps=len(state.rewards) + len(state.trained),
            reward_by_step=[reward for _, reward in sorted(state.rewards.items())],
            groups=GroupCounts(issued=state.num_issued, trained=trained, dropped=dropped, open=open_groups),
            episodes=EpisodeCounts(requested=state.requested, ended=state.ended, rejected=state.rejected),
            dead_letters=state.dead,
            staleness=Staleness(max=state.staleness, bound=self._bound),
            trained_rows=state.trained_rows,
            unexplained=len(unexplained),
            unexplained_groups=unexplained[:50],
            doubled=doubled,
            dropped_by_reason=dict(sorted(reasons.items())),
            classes=dict(sorted(state.classes.items())),
            classes_by_harness=[
                HarnessClasses(stream=stream, harness=harness, classes=dict(sorted(counts.items())))
                for (stream, harness), counts in sorted(state.classes_by_harness.items())
            ],
            groups_by_stream=dict(sorted(state.streams.items())),
            extra_launches=state.extra_launches,
            evaluations=self._evaluations.results(),
            solved=self._solved.results(),
            seconds=round(seconds, 3),
        )


def _count(counts: dict[str, int], key: str) -> None:
    counts[key] = counts.get(key, 0) + 1


async def account(broker: Broker, *, staleness_bound: int | None, seconds: float = 0.0) -> RunAccount:
    """A run's account, from what was kept of the purged part of its log and a scan of all that stands now."""
    kept = await read_ledger(broker)
    collected = Account(broker.run, staleness_bound=staleness_bound, state=kept.state)
    async with RunLog(broker).read(ACCOUNT_TOPICS, after_sequence=kept.sequence, follow=False) as entries:
        async for entry in entries:
            collected.take(entry.message, entry.sequence)
    found = await broker.load_state("fold.assembly")
    folded_up_to = 0 if found is None else msgspec.msgpack.decode(found[0], type=FoldCheckpoint).sequence
    return collected.result(folded_up_to=folded_up_to, seconds=seconds)


class KeptAccount(msgspec.Struct, frozen=True, kw_only=True):
    """The account up to a place in the log, as it was saved before a purge."""

    sequence: int = 0
    state: AccountState = msgspec.field(default_factory=AccountState)


async def read_ledger(broker: Broker) -> KeptAccount:
    """What was saved last; an empty account where nothing was ever purged."""
    before: bytes | None = None
    while (found := await broker.load_state(LEDGER_KEY)) is not None:
        checkpoint = msgspec.msgpack.decode(found[0], type=FoldCheckpoint)
        try:
            data = await broker.payloads.get(checkpoint.state)
        except PayloadMissingError:
            if found[0] == before:
                raise
            before = found[0]  # a newer one was saved meanwhile
            continue
        return KeptAccount(sequence=checkpoint.sequence, state=msgspec.msgpack.decode(data, type=AccountState))
    return KeptAccount()
