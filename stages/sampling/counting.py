"""What happens to issued groups, counted in sampling's state, and the credit that follows from it: pure.

issued ──▶ running ──closed, usable──▶ waiting ──in a trained step──▶ gone
              └──closed, not usable, or dropped from a step──▶ gone
"""

from __future__ import annotations

from schemas.messages.sampling import ControlAction, GroupClosed
from schemas.messages.training import StepAssembled, StepTrained
from stages.sampling.credit import Credit, available
from stages.sampling.settings import SamplingSettings
from stages.sampling.state import SamplingState


def close_group(state: SamplingState, closed: GroupClosed, *, trains: bool) -> None:
    """A group has no open slot any more."""
    state.evaluating.pop(closed.group, None)
    if closed.group not in state.running:
        return
    del state.running[closed.group]
    if closed.usable and trains:
        state.waiting[closed.group] = None
    elif not closed.usable:
        state.num_groups_dropped += 1


def assemble(state: SamplingState, assembled: StepAssembled) -> None:
    """A step holds groups that wait, and dropped others."""
    if assembled.step <= state.num_assembled:
        return
    state.num_assembled = assembled.step
    state.steps[assembled.step] = assembled.groups
    for dropped in assembled.dropped:
        state.num_groups_dropped += _remove(state.waiting, dropped.group)


def train(state: SamplingState, trained: StepTrained) -> None:
    """A step is trained: its groups wait no more."""
    if trained.generation < state.trainer:  # it was superseded and didn't know it yet
        return
    state.trainer = trained.generation
    if trained.step <= state.num_trained:
        return
    state.num_trained = trained.step
    for step in sorted(state.steps):
        if step <= trained.step:
            for group in state.steps.pop(step):
                state.num_groups_trained += _remove(state.waiting, group)


def obey(state: SamplingState, action: ControlAction) -> None:
    """Somebody asks the run to pause, go on, or go empty."""
    match action:
        case ControlAction.PAUSE:
            state.paused = True
        case ControlAction.RESUME:
            state.paused = False
            state.draining = False
        case ControlAction.DRAIN | ControlAction.STOP:
            state.draining = True


def credit_of(settings: SamplingSettings, state: SamplingState, *, epoch_size: int | None) -> Credit:
    """How many groups may be issued now.

    Args:
        epoch_size: groups in an epoch of the listed streams; None while they are not known.
    """
    if state.paused:
        return Credit(groups=0, bound_by="paused")
    if state.draining:
        return Credit(groups=0, bound_by="draining")
    limits: list[int] = []
    if state.max_steps is not None:
        # A step that is assembled and not trained has its groups among the waiting ones.
        steps_left = state.max_steps - state.num_trained
        taken = len(state.running) + len(state.waiting) if settings.trains else state.num_training_issued
        limits.append(steps_left * settings.groups_per_step - taken)
    if state.max_epochs is not None and epoch_size is not None:
        limits.append(state.max_epochs * epoch_size - state.num_training_issued)
    return available(
        running=len(state.running),
        waiting=len(state.waiting),
        groups_per_step=settings.groups_per_step,
        max_staleness=settings.max_staleness if settings.trains else None,
        max_concurrent=settings.max_concurrent_groups - len(state.evaluating),
        full=state.full,
        room=None if state.issue_below is None else state.issue_below - state.num_issued,
        still_needed=min(limits) if limits else None,
    )


def _remove(groups: dict[str, None], group: str) -> int:
    """Take a group out; how many there were (0 or 1)."""
    if group not in groups:
        return 0
    del groups[group]
    return 1
