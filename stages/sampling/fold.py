"""Sampling with its credit: a fold from what happened to the groups that are issued.

    run.started ───┐
    stream.listed ─┤
    group.closed ──┤
    step.assembled ┼──▶ credit ──▶ mixture ──▶ group.issued
    step.trained ──┤
    run.control ───┤
    fold.tick ─────┘

This module knows streams, rows and credit; it must not know how an episode is run, nor a clock.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final, Literal

import msgspec

from pipeline.errors import ContractError
from pipeline.fold import Output
from pipeline.stage import AnyTopic
from schemas.ids import group_id
from schemas.messages.sampling import (
    Control,
    ControlAction,
    GroupClosed,
    GroupIssued,
    RunFinished,
    RunStarted,
    StreamListed,
    StreamRow,
    Tick,
)
from schemas.messages.training import StepAssembled, StepTrained
from schemas.payload import PayloadRef
from schemas.topics import (
    FOLD_TICK,
    GROUP_CLOSED,
    GROUP_ISSUED,
    RUN_CONTROL,
    RUN_FINISHED,
    RUN_STARTED,
    STEP_ASSEMBLED,
    STEP_TRAINED,
    STREAM_LISTED,
)
from stages.sampling.credit import Credit, available
from stages.sampling.evaluation import (
    EvaluationPlan,
    EvaluationState,
    EvaluationStream,
    most_at_once,
    next_row,
    see_version,
)
from stages.sampling.mixture import Mixture, MixturePosition, MixtureStream, draw, plan_mixture, start


class SamplingSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What the fold depends on besides the log; fixed for a run."""

    streams: tuple[str, ...]
    """The streams that must be listed before the first group is issued."""
    groups_per_step: int
    slots_per_group: int
    max_staleness: int
    max_concurrent_groups: int
    order: Literal["smallest_next", "quota"] = "smallest_next"
    epoch_size_groups: int = 0
    seed: int | None = None
    """Shuffle seed; None keeps the source order."""
    group_deadline_s: float | None = None
    tick_period_s: float = 2.0
    trains: bool = True
    """False: nothing is trained, so a closed group waits for nothing."""
    evaluations: tuple[EvaluationStream, ...] = ()
    """Streams that are run every so many versions and never trained on."""


class SamplingState(msgspec.Struct, kw_only=True):
    """Everything that sampling knows; checkpointed."""

    listed: dict[str, StreamListed] = {}
    start: int = 0
    """Ordinal of the run's latest start."""
    finished: int = -1
    """The start for which the end was said."""
    max_steps: int | None = None
    """The run's end, as its latest start set it."""
    max_epochs: int | None = None
    position: MixturePosition | None = None
    num_issued: int = 0
    running: dict[str, None] = {}
    """Issued and not closed."""
    waiting: dict[str, None] = {}
    """Closed, usable, in no trained step."""
    steps: dict[int, list[str]] = {}
    """Assembled and not yet trained: step → its groups."""
    num_assembled: int = 0
    """Highest assembled step."""
    num_trained: int = 0
    """Highest trained step: the weight version that exists."""
    num_groups_trained: int = 0
    num_groups_dropped: int = 0
    num_evaluation_issued: int = 0
    """Evaluation groups among `num_issued`."""
    evaluations: dict[str, EvaluationState] = {}
    evaluating: dict[str, None] = {}
    """Evaluation groups that are issued and not closed."""
    tick: int = 0
    paused: bool = False
    draining: bool = False


class SamplingFold:
    """See the module."""

    name = "sampling"
    consumes: tuple[AnyTopic, ...] = (
        RUN_STARTED,
        STREAM_LISTED,
        GROUP_CLOSED,
        STEP_ASSEMBLED,
        STEP_TRAINED,
        RUN_CONTROL,
        FOLD_TICK,
    )
    produces: tuple[AnyTopic, ...] = (GROUP_ISSUED, RUN_FINISHED)
    state_type = SamplingState

    def __init__(self, settings: SamplingSettings) -> None:
        self._settings: Final = settings
        self._known: Final = {*settings.streams, *(stream.name for stream in settings.evaluations)}
        self._rows: Final[dict[str, list[StreamRow]]] = {}
        """Content of the listed streams, by payload id."""
        self._mixture: Mixture | None = None

    def initial(self) -> SamplingState:
        return SamplingState()

    def wants(self, message: msgspec.Struct) -> PayloadRef | None:
        return message.rows if isinstance(message, StreamListed) and message.rows.id not in self._rows else None

    def wanted_by(self, state: SamplingState) -> Sequence[PayloadRef]:
        return [listed.rows for listed in state.listed.values() if listed.rows.id not in self._rows]

    def load(self, ref: PayloadRef, data: memoryview) -> None:
        self._rows[ref.id] = msgspec.msgpack.decode(data, type=list[StreamRow])

    def step(self, state: SamplingState, message: msgspec.Struct) -> list[Output]:
        """Take one message in; the groups that may be issued after it."""
        match message:
            case RunStarted():
                state.start = message.ordinal
                state.max_steps, state.max_epochs = message.steps, message.epochs
                state.draining = False
            case StreamListed():
                if message.stream in self._known and message.stream not in state.listed:
                    state.listed[message.stream] = message
            case GroupClosed():
                self._close(state, message)
            case StepAssembled():
                if message.step > state.num_assembled:
                    state.num_assembled = message.step
                    state.steps[message.step] = message.groups
                    for dropped in message.dropped:
                        state.num_groups_dropped += _remove(state.waiting, dropped.group)
            case StepTrained():
                self._train(state, message)
            case Control():
                self._obey(state, message.action)
            case Tick():
                state.tick = max(state.tick, message.ordinal)
            case _:
                raise ContractError(f"sampling does not consume {type(message).__name__}")
        return [*self._evaluate(state), *self._issue(state), *self._finish(state)]

    def describe(self, state: SamplingState) -> tuple[str, Mapping[str, float]]:
        missing = [name for name in self._settings.streams if name not in state.listed]
        credit = self._credit(state)
        if state.finished >= state.start:
            waits_for = "nothing: the run is finished"
        elif missing:
            waits_for = f"the rows of stream {', '.join(missing)}"
        elif credit.groups:
            waits_for = "nothing"
        else:
            waits_for = (
                f"credit, bound by {credit.bound_by}: {len(state.running)} groups running, {len(state.waiting)} waiting"
            )
        return waits_for, {
            "groups_issued": state.num_issued,
            "groups_running": len(state.running),
            "groups_waiting": len(state.waiting),
            "groups_trained": state.num_groups_trained,
            "capacity": credit.groups,
            "version": state.num_trained,
            "groups_evaluating": len(state.evaluating),
            "evaluations_skipped": sum(found.num_skipped for found in state.evaluations.values()),
        }

    def _close(self, state: SamplingState, closed: GroupClosed) -> None:
        state.evaluating.pop(closed.group, None)
        if closed.group not in state.running:
            return
        del state.running[closed.group]
        if closed.usable and self._settings.trains:
            state.waiting[closed.group] = None
        elif closed.usable:
            return
        else:
            state.num_groups_dropped += 1

    def _train(self, state: SamplingState, trained: StepTrained) -> None:
        if trained.step <= state.num_trained:
            return
        state.num_trained = trained.step
        for step in sorted(state.steps):
            if step <= trained.step:
                for group in state.steps.pop(step):
                    state.num_groups_trained += _remove(state.waiting, group)

    def _obey(self, state: SamplingState, action: ControlAction) -> None:
        match action:
            case ControlAction.PAUSE:
                state.paused = True
            case ControlAction.RESUME:
                state.paused = False
                state.draining = False
            case ControlAction.DRAIN | ControlAction.STOP:
                state.draining = True

    def _credit(self, state: SamplingState) -> Credit:
        settings = self._settings
        if state.paused:
            return Credit(groups=0, bound_by="paused")
        if state.draining:
            return Credit(groups=0, bound_by="draining")
        limits: list[int] = []
        if state.max_steps is not None:
            # A step that is assembled and not trained has its groups among the waiting ones.
            steps_left = state.max_steps - state.num_trained
            taken = len(state.running) + len(state.waiting) if settings.trains else self._num_training(state)
            limits.append(steps_left * settings.groups_per_step - taken)
        if state.max_epochs is not None and self._mixture is not None:
            limits.append(state.max_epochs * self._mixture.epoch_size - self._num_training(state))
        return available(
            running=len(state.running),
            waiting=len(state.waiting),
            groups_per_step=settings.groups_per_step,
            max_staleness=settings.max_staleness if settings.trains else None,
            max_concurrent=settings.max_concurrent_groups - len(state.evaluating),
            still_needed=min(limits) if limits else None,
        )

    def _plan(self, state: SamplingState) -> Mixture | None:
        """The mixture, as soon as every stream is listed."""
        if self._mixture is None and all(name in state.listed for name in self._settings.streams):
            settings = self._settings
            self._mixture = plan_mixture(
                [
                    MixtureStream(
                        name=name,
                        num_rows=len(self._rows[state.listed[name].rows.id]),
                        sampling_weight=state.listed[name].weight,
                    )
                    for name in settings.streams
                ],
                epoch_size=settings.epoch_size_groups,
                size_multiple=settings.groups_per_step if settings.epoch_size_groups else 1,
                order=settings.order,
                seed=settings.seed,
            )
        return self._mixture

    def _num_training(self, state: SamplingState) -> int:
        return state.num_issued - state.num_evaluation_issued

    def _evaluate(self, state: SamplingState) -> list[Output]:
        """Evaluation groups go before others when they are due, and leave room for those that train."""
        settings = self._settings
        if state.paused or state.draining or not settings.evaluations:
            return []
        plans: list[EvaluationPlan] = []
        for stream in settings.evaluations:
            found = state.evaluations.setdefault(stream.name, EvaluationState())
            see_version(found, stream, state.num_trained)
            listed = state.listed.get(stream.name)
            if listed is not None:
                plans.append(EvaluationPlan(stream=stream, state=found, rows=self._rows[listed.rows.id]))
        places = min(
            most_at_once(settings.max_concurrent_groups) - len(state.evaluating),
            settings.max_concurrent_groups - len(state.running) - len(state.evaluating),
        )
        outputs: list[Output] = []
        for plan in plans:
            while places > 0 and (row := next_row(plan)) is not None:
                issued = self._evaluation_group(state, plan, row)
                state.num_issued += 1
                state.num_evaluation_issued += 1
                state.evaluating[issued.group] = None
                outputs.append(Output(message=issued))
                places -= 1
        return outputs

    def _issue(self, state: SamplingState) -> list[Output]:
        mixture = self._plan(state)
        if mixture is None:
            return []
        position = state.position or start(mixture)
        outputs: list[Output] = []
        for _ in range(self._credit(state).groups):
            drawn, position = draw(mixture, position)
            row = self._rows[state.listed[drawn.stream].rows.id][drawn.row]
            issued = self._group(state, drawn.stream, row, drawn.epoch)
            state.num_issued += 1
            state.running[issued.group] = None
            outputs.append(Output(message=issued))
        state.position = position
        return outputs

    def _finish(self, state: SamplingState) -> list[Output]:
        """Say the end once: the last step is trained, or what is left of the epochs can make no step any more."""
        if state.finished >= state.start or state.steps or self._evaluates(state):
            return []
        reason = ""
        if state.max_steps is not None and state.num_trained >= state.max_steps:
            reason = "steps"
        elif (
            state.max_epochs is not None
            and self._mixture is not None
            and self._num_training(state) >= state.max_epochs * self._mixture.epoch_size
            and not state.running
            and len(state.waiting) < self._settings.groups_per_step
        ):
            reason = "epochs"
        if not reason:
            return []
        state.finished = state.start
        return [Output(message=RunFinished(ordinal=state.start, steps=state.num_trained, reason=reason))]

    def _evaluates(self, state: SamplingState) -> bool:
        """Whether an evaluation is due or under way: the run's end waits for it."""
        if state.evaluating:
            return True
        for stream in self._settings.evaluations:
            found, listed = state.evaluations.get(stream.name), state.listed.get(stream.name)
            if found is None or listed is None or found.due > found.version or found.next_row < listed.num_rows:
                return True
        return False

    def _deadline_tick(self, state: SamplingState) -> int | None:
        settings = self._settings
        if settings.group_deadline_s is None:
            return None
        return state.tick + max(1, math.ceil(settings.group_deadline_s / settings.tick_period_s))

    def _evaluation_group(self, state: SamplingState, plan: EvaluationPlan, row: StreamRow) -> GroupIssued:
        return GroupIssued(
            group=group_id(state.num_issued),
            ordinal=state.num_issued,
            stream=plan.stream.name,
            data_id=row.data_id,
            tags=row.tags,
            prompt=row.payload,
            epoch=plan.state.version // plan.stream.every_versions,
            num_slots=plan.stream.slots,
            min_version=plan.state.version,
            evaluation=True,
            deadline_tick=self._deadline_tick(state),
        )

    def _group(self, state: SamplingState, stream: str, row: StreamRow, epoch: int) -> GroupIssued:
        settings = self._settings
        # The step that can train it at the earliest: whole steps of groups are ahead of it.
        ahead = len(state.running) + len(state.waiting)
        earliest_step = state.num_trained + 1 + ahead // settings.groups_per_step
        return GroupIssued(
            group=group_id(state.num_issued),
            ordinal=state.num_issued,
            stream=stream,
            data_id=row.data_id,
            tags=row.tags,
            prompt=row.payload,
            epoch=epoch,
            num_slots=settings.slots_per_group,
            min_version=max(0, earliest_step - 1 - settings.max_staleness) if settings.trains else 0,
            deadline_tick=self._deadline_tick(state),
        )


def _remove(groups: dict[str, None], group: str) -> int:
    """Take a group out; how many there were (0 or 1)."""
    if group not in groups:
        return 0
    del groups[group]
    return 1
