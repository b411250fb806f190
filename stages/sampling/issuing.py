"""The message that issues a group: pure."""

from __future__ import annotations

import math

from pipeline.fold import Output
from schemas.ids import group_id
from schemas.messages.sampling import GroupIssued, StreamRow
from schemas.payload import PayloadRef, run_ref
from stages.sampling.evaluation import EvaluationPlan
from stages.sampling.settings import SamplingSettings
from stages.sampling.state import SamplingState


def training_group(settings: SamplingSettings, state: SamplingState, stream: str, row: StreamRow, epoch: int) -> Output:
    """A row's group, to be trained on. A prompt that rides in the row is stored beside the log: each group and episode
    names it and does not carry it.
    """
    # The step that can train it at the earliest: whole steps of groups are ahead of it.
    ahead = len(state.running) + len(state.waiting)
    earliest_step = state.num_trained + 1 + ahead // settings.groups_per_step
    prompt, payloads = _stored(row.payload)
    issued = GroupIssued(
        group=group_id(state.num_issued),
        ordinal=state.num_issued,
        stream=stream,
        data_id=row.data_id,
        tags=row.tags,
        prompt=prompt,
        epoch=epoch,
        num_slots=settings.slots_per_group,
        min_version=max(0, earliest_step - 1 - settings.max_staleness) if settings.trains else 0,
        deadline_tick=deadline_tick(settings, state),
    )
    return Output(message=issued, payloads=payloads)


def evaluation_group(
    settings: SamplingSettings, state: SamplingState, plan: EvaluationPlan, row: StreamRow
) -> GroupIssued:
    """A row's group, never to be trained on."""
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
        deadline_tick=deadline_tick(settings, state),
    )


def deadline_tick(settings: SamplingSettings, state: SamplingState) -> int | None:
    """The tick at which a group that is issued now is closed with the members it has."""
    if settings.group_deadline_s is None:
        return None
    return state.tick + max(1, math.ceil(settings.group_deadline_s / settings.tick_period_s))


def _stored(prompt: PayloadRef | None) -> tuple[PayloadRef | None, tuple[bytes, ...]]:
    if prompt is None or prompt.inline is None:
        return prompt, ()
    return run_ref(prompt.inline), (bytes(prompt.inline),)
