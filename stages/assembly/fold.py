"""Assembly as a fold over the log: groups open, fill, close, wait and become steps.

    group.issued ──▶ open ──all slots ended, or the deadline's tick──▶ judged ──▶ waiting ──enough──▶ step.assembled
                      ▲                                                  │          │
              trajectory.ready                              group.closed (usable    └─too old──▶ dropped, named in
                                                            or not, with reason)                 the step before

Every issued group ends in exactly one of trained, dropped (reason) or open. What has ended leaves the state. Time
enters as ticks only. Training moves counts and nothing else: another trainer may assemble from the same trajectories
in a run of its own and gets the same manifests. This module must not know a clock, a broker or a token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import msgspec
import structlog

from pipeline.errors import ContractError
from pipeline.fold import Output
from pipeline.stage import AnyTopic
from schemas.messages.rollout import Trajectory
from schemas.messages.sampling import Control, ControlAction, GroupClosed, GroupIssued, RunStarted, Tick
from schemas.messages.training import DroppedGroup, StepTrained
from schemas.payload import PayloadRef
from schemas.topics import (
    FOLD_TICK,
    GROUP_CLOSED,
    GROUP_ISSUED,
    RUN_CONTROL,
    RUN_STARTED,
    STEP_ASSEMBLED,
    STEP_TRAINED,
    TRAJECTORY_READY,
)
from stages.assembly import stall
from stages.assembly.batch import build_batch
from stages.assembly.filters import Reason, UserFilter, drop_reason, load_filters, silent_streams, usable
from stages.assembly.manifest import announce, build_manifest
from stages.assembly.membership import admit, choose, freshen, refuse_lone_members
from stages.assembly.settings import AssemblySettings, check_settings
from stages.assembly.state import AssemblyState, Group, Tally, is_new
from stages.assembly.stats import tally_closed, tally_dropped

log = structlog.get_logger("headrace.assembly")


class StalledError(ContractError):
    """Nothing trainable came for so long that going on would only burn compute."""


class AssemblyFold:
    """See the module."""

    name = "assembly"
    consumes: tuple[AnyTopic, ...] = (
        GROUP_ISSUED,
        TRAJECTORY_READY,
        FOLD_TICK,
        STEP_TRAINED,
        RUN_STARTED,
        RUN_CONTROL,
    )
    produces: tuple[AnyTopic, ...] = (GROUP_CLOSED, STEP_ASSEMBLED)
    state_type = AssemblyState

    def __init__(self, settings: AssemblySettings, user_filters: Sequence[UserFilter] = ()) -> None:
        """Check the settings; `user_filters` come on top of those that the settings name."""
        self._settings: Final = check_settings(settings)
        self._user_filters: Final = (*load_filters(settings.user_filters), *user_filters)

    def initial(self) -> AssemblyState:
        return AssemblyState()

    def wants(self, message: msgspec.Struct) -> PayloadRef | None:  # noqa: ARG002 - the fold's protocol
        """Nothing: assembly never reads tokens."""
        return None

    def wanted_by(self, state: AssemblyState) -> Sequence[PayloadRef]:  # noqa: ARG002 - the fold's protocol
        """Nothing, see `wants`."""
        return ()

    def load(self, ref: PayloadRef, data: memoryview) -> None:  # noqa: ARG002 - the fold's protocol
        """Never called, see `wants`."""
        raise ContractError(f"assembly wants no payload, found {ref.id}")

    def step(self, state: AssemblyState, message: msgspec.Struct) -> list[Output]:
        """Take one message in; the groups and steps that follow from it.

        Raises:
            ContractError: a slot that no group has, or more rows than allowed.
        """
        match message:
            case Trajectory():
                return self._take_trajectory(state, message)
            case GroupIssued():
                self._open(state, message)
            case Tick():
                return self._tick(state, message)
            case StepTrained():
                self._train(state, message)
            case RunStarted():
                stall.restarted(state.stall)
            case Control():
                self._obey(state, message.action)
            case _:
                raise ContractError(f"assembly does not consume {type(message).__name__}")
        return []

    def refuse_stall(self, state: AssemblyState) -> None:
        """Call this after messages that came while the fold ran, not after those that it finds at its start: only a
        stall that lasts until now ends a run, and the log of one that was mended can be folded again.

        Raises:
            StalledError: nothing trainable came for too long.
        """
        if state.stall.ended:
            raise StalledError(state.stall.ended)

    def describe(self, state: AssemblyState) -> tuple[str, Mapping[str, float]]:
        waits_for = f"{len(state.waiting)} of {self._settings.groups_per_step} usable groups for step {state.next_step}"
        oldest = next(iter(state.open.values()), None)
        if oldest is not None:
            missing = [str(slot) for slot in range(oldest.num_slots) if slot not in oldest.members]
            waits_for += (
                f"; trajectory.ready of {len(state.open)} open groups: {oldest.group} misses slot {', '.join(missing[:4])} "
                f"({len(missing)} of {oldest.num_slots}) since tick {oldest.opened_tick}"
                + (f", until tick {oldest.deadline_tick}" if oldest.deadline_tick is not None else "")
            )
        if state.stall.warning:
            waits_for += f"; {state.stall.warning}"
        return waits_for, {
            "groups_open": len(state.open),
            "groups_waiting": len(state.waiting),
            "groups_in_training": sum(state.in_training.values()),
            "groups_trained": state.num_groups_trained,
            "groups_dropped": state.num_groups_dropped,
            "late_members": state.num_late,
            "duplicate_members": state.num_duplicate,
            "next_step": state.next_step,
            **state.last_step,
        }

    def _open(self, state: AssemblyState, issued: GroupIssued) -> None:
        if is_new(state, issued.ordinal):
            state.open[issued.group] = Group(
                group=issued.group,
                ordinal=issued.ordinal,
                stream=issued.stream,
                num_slots=issued.num_slots,
                evaluation=issued.evaluation,
                opened_tick=state.tick,
                deadline_tick=issued.deadline_tick,
            )

    def _take_trajectory(self, state: AssemblyState, trajectory: Trajectory) -> list[Output]:
        group = state.open.get(trajectory.group)
        if group is None:
            state.num_late += 1
            return []
        if trajectory.slot in group.members:
            state.num_duplicate += 1
            return []
        group.members[trajectory.slot] = admit(trajectory, group, self._settings)
        if len(group.members) < group.num_slots:
            return []
        return [*self._close(state, group), *self._assemble(state)]

    def _tick(self, state: AssemblyState, tick: Tick) -> list[Output]:
        if tick.ordinal <= state.tick:
            return []
        state.tick = tick.ordinal
        due = [g for g in state.open.values() if g.deadline_tick is not None and g.deadline_tick <= tick.ordinal]
        outputs = [output for group in due for output in self._close(state, group)]
        outputs += self._assemble(state)
        now_s, known = tick.ordinal * tick.period_s, state.stall.ended
        verdict = stall.ticked(state.stall, now_s, self._settings.groups_per_step, self._settings.stall)
        match verdict:
            case stall.Verdict.FINE:
                pass
            case stall.Verdict.WARN:
                log.warning("assembly adds nothing to train", detail=state.stall.warning)
                self._name_silent_streams(state)
            case stall.Verdict.END:
                if not known:
                    log.error("assembly has had nothing to train for too long", detail=state.stall.ended)
        return outputs

    def _obey(self, state: AssemblyState, action: ControlAction) -> None:
        """Sampling is what a pause stops; here the stall rule's time stands still."""
        if action in (ControlAction.PAUSE, ControlAction.RESUME):
            state.stall.paused = action is ControlAction.PAUSE

    def _train(self, state: AssemblyState, trained: StepTrained) -> None:
        if trained.generation < state.trainer:  # it was superseded and didn't know it yet
            return
        state.trainer = trained.generation
        for step in [step for step in state.in_training if step <= trained.step]:
            state.num_groups_trained += state.in_training.pop(step)
        state.num_trained = max(state.num_trained, trained.step)

    def _close(self, state: AssemblyState, group: Group) -> list[Output]:
        """Judge a group as it stands, for the step that could train it first."""
        settings = self._settings
        del state.open[group.group]
        fresh = freshen(group, state.next_step, settings)
        reason = drop_reason(group, settings, self._user_filters)
        if not reason and fresh is not group and drop_reason(fresh, settings, self._user_filters):
            reason = Reason.STALE
        if group.evaluation:
            state.num_groups_evaluated += 1
        else:
            tally_closed(self._tally(state, group), group, reason, settings)
            state.closed_while_short += len(state.waiting) >= settings.groups_per_step
            state.ended_in_round += 1
            if reason:
                self._drop(state, group, reason)
            else:
                state.waiting[group.group] = fresh
                stall.added(state.stall)
        num_usable = len(usable(fresh))
        closed = GroupClosed(
            group=group.group,
            stream=group.stream,
            usable=not reason,
            reason=reason,
            num_slots=group.num_slots,
            num_usable=num_usable,
            num_rejected=len(group.members) - num_usable,
            num_missing=group.num_slots - len(group.members),
            evaluation=group.evaluation,
        )
        return [Output(message=closed)]

    def _assemble(self, state: AssemblyState) -> list[Output]:
        outputs: list[Output] = []
        while (chosen := choose(state, self._settings)) is not None:
            outputs.append(self._assemble_step(state, chosen.groups, chosen.missing_shares))
        if not state.waiting and state.ended_in_round >= self._settings.groups_per_step:
            state.ended_in_round = 0  # a round of dropped groups only: the next one begins
        return outputs

    def _assemble_step(self, state: AssemblyState, groups: Sequence[Group], missing_shares: int) -> Output:
        settings, step = self._settings, state.next_step
        for group in groups:
            del state.waiting[group.group]
        state.next_step = step + 1
        state.in_training[step] = len(groups)
        self._drop_too_old(state)
        refuse_lone_members(groups, settings)
        batch = build_batch(groups, settings)
        extra = {
            "late_members": float(state.num_late),
            "duplicate_members": float(state.num_duplicate),
            "missing_min_share_groups": float(missing_shares),
            "waiting_groups": float(len(state.waiting)),
        }
        manifest = build_manifest(batch, step, state.dropped, state.tallies, extra, settings)
        self._name_silent_streams(state)
        state.last_step = {
            **manifest.stats,
            **{
                f"{stream}.{key}": value
                for stream, found in manifest.stream_stats.items()
                for key, value in found.items()
            },
        }
        state.dropped, state.tallies = [], {}
        state.ended_in_round = len(state.waiting)
        state.closed_while_short = 0
        message, data = announce(manifest, batch)
        return Output(message=message, payloads=(data,))

    def _drop_too_old(self, state: AssemblyState) -> None:
        """What no coming step can train is dropped now, so that its credit goes back with this step's message."""
        for group in list(state.waiting.values()):
            fresh = freshen(group, state.next_step, self._settings)
            if fresh is group:
                continue
            if drop_reason(fresh, self._settings, self._user_filters):
                del state.waiting[group.group]
                tally_dropped(self._tally(state, group), Reason.STALE)
                self._drop(state, group, Reason.STALE)
            else:
                state.waiting[group.group] = fresh

    def _drop(self, state: AssemblyState, group: Group, reason: str) -> None:
        state.num_groups_dropped += 1
        state.dropped.append(DroppedGroup(group=group.group, stream=group.stream, reason=reason))
        if reason != Reason.UNCLAIMED:  # a service without work is no fault of the run's
            stall.dropped(state.stall, reason)

    def _tally(self, state: AssemblyState, group: Group) -> Tally:
        return state.tallies.setdefault(group.stream, Tally())

    def _name_silent_streams(self, state: AssemblyState) -> None:
        closed = {name: tally.closed for name, tally in state.tallies.items()}
        dropped = {name: sum(tally.dropped.values()) for name, tally in state.tallies.items()}
        for name in silent_streams(closed, dropped, sorted(state.tallies)):
            log.warning("all groups of a stream were dropped", stream=name, reasons=dict(state.tallies[name].dropped))
