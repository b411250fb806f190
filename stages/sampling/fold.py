"""Sampling with its credit: a fold from what happened to the groups that are issued.

    run.started ─────┐
    stream.listed ───┤
    prompt.published ┤
    group.closed ────┤
    step.assembled ──┼──▶ credit ──▶ turns, mixture ──▶ group.issued
    step.trained ────┤
    run.control ─────┤
    fold.tick ───────┘

This module knows streams, rows and credit; it must not know how an episode is run, nor a clock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from pipeline.errors import ContractError
from pipeline.fold import Output
from pipeline.stage import AnyTopic
from schemas.ids import group_id
from schemas.messages.sampling import (
    Control,
    GroupClosed,
    PromptPublished,
    Retain,
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
    PROMPT_PUBLISHED,
    RUN_CONTROL,
    RUN_FINISHED,
    RUN_RETAIN,
    RUN_STARTED,
    STEP_ASSEMBLED,
    STEP_TRAINED,
    STREAM_LISTED,
)
from stages.sampling.counting import assemble, close_group, credit_of, obey, train
from stages.sampling.credit import Credit, what_frees
from stages.sampling.evaluation import EvaluationPlan, EvaluationState, most_at_once, next_row, see_version
from stages.sampling.issuing import evaluation_group, training_group
from stages.sampling.mixture import Mixture, MixtureStream, draw, plan_mixture, start
from stages.sampling.open_streams import LISTED, OpenStream, Taker, add_row, next_turn, take_row, takers
from stages.sampling.settings import SamplingSettings
from stages.sampling.state import SamplingState


class SamplingFold:
    """See the module."""

    name = "sampling"
    consumes: tuple[AnyTopic, ...] = (
        RUN_STARTED,
        STREAM_LISTED,
        PROMPT_PUBLISHED,
        GROUP_CLOSED,
        STEP_ASSEMBLED,
        STEP_TRAINED,
        RUN_CONTROL,
        FOLD_TICK,
        RUN_RETAIN,
    )
    produces: tuple[AnyTopic, ...] = (GROUP_ISSUED, RUN_FINISHED)
    state_type = SamplingState

    def __init__(self, settings: SamplingSettings) -> None:
        self._settings: Final = settings
        self._known: Final = {*settings.streams, *(stream.name for stream in settings.evaluations)}
        self._open: Final = frozenset(stream.name for stream in settings.open_streams)
        self._rows: Final[dict[str, list[StreamRow]]] = {}
        """Content of the listed streams, by payload id."""
        self._mixture: Mixture | None = None

    def initial(self) -> SamplingState:
        return SamplingState()

    def wants(self, message: msgspec.Struct) -> PayloadRef | None:
        if not isinstance(message, StreamListed) or message.stream in self._open or message.rows.id in self._rows:
            return None
        return message.rows

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
                if state.issue_below is None:
                    state.issue_below = message.issue_below
            case StreamListed() | PromptPublished():
                self._fill(state, message)
            case GroupClosed():
                close_group(state, message, trains=self._settings.trains)
            case StepAssembled():
                assemble(state, message)
            case StepTrained():
                train(state, message)
            case Control():
                obey(state, message.action)
            case Tick():
                state.tick = max(state.tick, message.ordinal)
            case Retain():
                state.full = message.full
                if message.issue_below is not None:
                    state.issue_below = message.issue_below
            case _:
                raise ContractError(f"sampling does not consume {type(message).__name__}")
        return [*self._evaluate(state), *self._issue(state), *self._finish(state)]

    def describe(self, state: SamplingState) -> tuple[str, Mapping[str, float]]:
        missing = [name for name in self._settings.streams if name not in state.listed]
        credit = self._credit(state)
        turn = next_turn(self._takers(state))
        if state.finished >= state.start:
            waits_for = "nothing: the run is finished"
        elif missing:
            waits_for = f"the rows of stream {', '.join(missing)}"
        elif not credit.groups:
            waits_for = (
                f"credit, bound by {credit.bound_by}: {len(state.running)} groups running, {len(state.waiting)} waiting"
            )
            frees = what_frees(credit, running=len(state.running), untrained_step=min(state.steps, default=None))
            waits_for += f"; {frees} frees some" if frees else ""
        elif turn.waits_for:
            waits_for = f"prompts on stream {', '.join(turn.waits_for)}"
        elif self._settings.open_streams and turn.name is None:
            waits_for = "nothing: every row of the closed streams is drawn"
        else:
            waits_for = "nothing"
        return waits_for, {
            "groups_issued": state.num_issued,
            "groups_running": len(state.running),
            "groups_waiting": len(state.waiting),
            "groups_trained": state.num_groups_trained,
            "capacity": credit.groups,
            "version": state.num_trained,
            "groups_evaluating": len(state.evaluating),
            "evaluations_skipped": sum(found.num_skipped for found in state.evaluations.values()),
            **{f"prompts_waiting.{name}": float(stream.num_waiting) for name, stream in state.open.items()},
            **{f"turns_passed.{name}": float(stream.passed) for name, stream in state.open.items() if stream.passed},
        }

    def _fill(self, state: SamplingState, message: StreamListed | PromptPublished) -> None:
        """Take up the rows of a stream, or one that was published into an open stream; an open stream's list closes it."""
        if message.stream in self._open:
            stream = state.open.setdefault(message.stream, OpenStream())
            if isinstance(message, PromptPublished):
                add_row(stream, message)
            else:
                stream.closed = True
        elif isinstance(message, StreamListed) and message.stream in self._known:
            state.listed.setdefault(message.stream, message)

    def _credit(self, state: SamplingState) -> Credit:
        return credit_of(self._settings, state, epoch_size=None if self._mixture is None else self._mixture.epoch_size)

    def _plan(self, state: SamplingState) -> Mixture | None:
        """The mixture of the listed streams, as soon as all of them are."""
        if (
            self._mixture is None
            and self._settings.streams
            and all(name in state.listed for name in self._settings.streams)
        ):
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

    def _evaluate(self, state: SamplingState) -> list[Output]:
        """Evaluation groups go before others when they are due, and leave room for those that train."""
        settings = self._settings
        if state.paused or state.draining or state.full or not settings.evaluations:
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
        if state.issue_below is not None:
            places = min(places, state.issue_below - state.num_issued)
        outputs: list[Output] = []
        for plan in plans:
            while places > 0 and (row := next_row(plan)) is not None:
                issued = evaluation_group(settings, state, plan, row)
                state.num_issued += 1
                state.num_evaluation_issued += 1
                state.evaluating[issued.group] = None
                outputs.append(Output(message=issued))
                places -= 1
        return outputs

    def _issue(self, state: SamplingState) -> list[Output]:
        if self._plan(state) is None and self._settings.streams:
            return []
        outputs: list[Output] = []
        for _ in range(self._credit(state).groups):
            found = self._next_row(state)
            if found is None:
                break
            output = training_group(self._settings, state, *found)
            state.running[group_id(state.num_issued)] = None
            state.num_issued += 1
            outputs.append(output)
        return outputs

    def _next_row(self, state: SamplingState) -> tuple[str, StreamRow, int] | None:
        """Stream, row and epoch of what is drawn next; None while there is nothing that may be drawn."""
        if not self._settings.open_streams:
            return self._listed_row(state)
        turn = next_turn(self._takers(state))
        if turn.name is None:
            return None
        for name, number in turn.passed.items():
            stream = state.open.setdefault(name, OpenStream())
            stream.turns += number
            stream.passed += number
        if turn.name == LISTED:
            state.listed_turns += 1
            return self._listed_row(state)
        stream = state.open[turn.name]
        stream.turns += 1
        return turn.name, take_row(stream), 0

    def _listed_row(self, state: SamplingState) -> tuple[str, StreamRow, int] | None:
        mixture = self._plan(state)
        if mixture is None:
            return None
        drawn, state.position = draw(mixture, state.position or start(mixture))
        return drawn.stream, self._rows[state.listed[drawn.stream].rows.id][drawn.row], drawn.epoch

    def _takers(self, state: SamplingState) -> list[Taker]:
        settings = self._settings
        if not settings.open_streams:
            return []
        return takers(
            settings.open_streams,
            state.open,
            listed_weights=[state.listed[name].weight for name in settings.streams if name in state.listed],
            listed_turns=state.listed_turns,
        )

    def _finish(self, state: SamplingState) -> list[Output]:
        """Say the end once: the last step is trained, or what is left of the epochs or of the closed streams can make no step."""
        if state.finished >= state.start or state.steps or self._evaluates(state):
            return []
        reason = ""
        if state.max_steps is not None and state.num_trained >= state.max_steps:
            reason = "steps"
        elif (
            state.max_epochs is not None
            and self._mixture is not None
            and state.num_training_issued >= state.max_epochs * self._mixture.epoch_size
            and not state.running
            and len(state.waiting) < self._settings.groups_per_step
        ):
            reason = "epochs"
        elif self._used_up(state) and not state.running and len(state.waiting) < self._settings.groups_per_step:
            reason = "streams"
        if not reason:
            return []
        state.finished = state.start
        return [Output(message=RunFinished(ordinal=state.start, steps=state.num_trained, reason=reason))]

    def _used_up(self, state: SamplingState) -> bool:
        """Whether every stream is an open one that was closed, and all its rows are drawn."""
        settings = self._settings
        return (
            bool(settings.open_streams)
            and not settings.streams
            and all(stream.name in state.open and state.open[stream.name].over for stream in settings.open_streams)
        )

    def _evaluates(self, state: SamplingState) -> bool:
        """Whether an evaluation is due or under way: the run's end waits for it."""
        if state.evaluating:
            return True
        for stream in self._settings.evaluations:
            found, listed = state.evaluations.get(stream.name), state.listed.get(stream.name)
            if found is None or listed is None or found.due > found.version or found.next_row < listed.num_rows:
                return True
        return False
