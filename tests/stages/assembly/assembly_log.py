"""Builders of the messages that assembly folds, and readers of what it says."""

from collections.abc import Iterable, Sequence

import msgspec
import numpy as np

from pipeline.fold import Output
from schemas.ids import group_id, row_id
from schemas.messages.rollout import EpisodeClass, Row, Trajectory
from schemas.messages.sampling import GroupClosed, GroupIssued, RunStarted, Tick
from schemas.messages.training import Manifest, StepAssembled, StepTrained
from schemas.payload import PayloadRef
from stages.assembly.advantages import Estimator, EstimatorSettings
from stages.assembly.fold import AssemblyFold
from stages.assembly.settings import AssemblySettings
from stages.assembly.state import AssemblyState

REINFORCE = EstimatorSettings(name=Estimator.REINFORCE)


def settings(**changes) -> AssemblySettings:
    return AssemblySettings(**{"run": "run", "groups_per_step": 1, "slots_per_group": 4, **changes})


def issued(
    ordinal: int, *, slots: int = 4, stream: str = "math", deadline: int | None = None, evaluation=False
) -> GroupIssued:
    return GroupIssued(
        group=group_id(ordinal),
        ordinal=ordinal,
        stream=stream,
        data_id=f"d{ordinal}",
        num_slots=slots,
        deadline_tick=deadline,
        evaluation=evaluation,
    )


def row(ordinal: int, slot: int, index: int = 0, **changes) -> Row:
    fields = {
        "row": row_id(group_id(ordinal), slot, index),
        "tokens": PayloadRef(store="run", id=f"{ordinal:016x}{slot:08x}{index:08x}", size_bytes=100),
        "num_tokens": 20,
        "num_loss_tokens": 10,
        "min_version": 0,
        "max_version": 0,
        "reward": 0.0,
    }
    return Row(**{**fields, **changes})


def trajectory(
    ordinal: int,
    slot: int,
    reward: float | None,
    *,
    stream: str = "math",
    rows: Sequence[Row] | None = None,
    solved: bool | None = None,
    rejected: str = "",
    **row_changes,
) -> Trajectory:
    if rows is None:
        rows = [] if reward is None or rejected else [row(ordinal, slot, reward=reward, **row_changes)]
    return Trajectory(
        group=group_id(ordinal),
        slot=slot,
        attempt=0,
        session=f"s{ordinal}-{slot}",
        stream=stream,
        data_id=f"d{ordinal}",
        outcome=EpisodeClass.SYSTEM if rejected else EpisodeClass.SCORED,
        rejected=bool(rejected),
        reason=rejected,
        rows=list(rows),
        score=reward,
        reward=None if rejected else reward,
        solved=bool(reward and reward > 0) if solved is None else solved,
        num_interactions=1,
        num_completion_tokens=sum(one.num_loss_tokens for one in rows),
    )


def whole_group(
    ordinal: int, rewards: Sequence[float | None], *, stream: str = "math", **row_changes
) -> list[msgspec.Struct]:
    """A group whose slots all end in order; None ends as rejected."""
    return [
        issued(ordinal, slots=len(rewards), stream=stream),
        *(
            trajectory(ordinal, slot, reward, stream=stream, rejected="failed" if reward is None else "", **row_changes)
            for slot, reward in enumerate(rewards)
        ),
    ]


def tick(ordinal: int, period_s: float = 1.0) -> Tick:
    return Tick(ordinal=ordinal, period_s=period_s, unix_time_s=0.0)


def started(ordinal: int) -> RunStarted:
    return RunStarted(ordinal=ordinal, config_json=b"{}", config_digest="", headrace_version="0")


def trained(step: int, generation: int = 1) -> StepTrained:
    return StepTrained(step=step, generation=generation, digest="", manifest_id="")


def fold_all(fold, messages: Iterable[msgspec.Struct]) -> tuple[AssemblyState, list[Output]]:
    state, outputs = fold.initial(), []
    for message in messages:
        outputs += fold.step(state, message)
    return state, outputs


def outputs_of(messages, user_filters=(), user_filters_named=(), **changes) -> list[Output]:
    """What a fold with these settings says to the messages."""
    fold = AssemblyFold(settings(user_filters=tuple(user_filters_named), **changes), user_filters)
    return fold_all(fold, messages)[1]


def closed(outputs: Iterable[Output]) -> list[GroupClosed]:
    return [output.message for output in outputs if isinstance(output.message, GroupClosed)]


def steps(outputs: Iterable[Output]) -> list[StepAssembled]:
    return [output.message for output in outputs if isinstance(output.message, StepAssembled)]


def manifests(outputs: Iterable[Output]) -> list[Manifest]:
    return [
        msgspec.msgpack.decode(output.payloads[0], type=Manifest)
        for output in outputs
        if isinstance(output.message, StepAssembled)
    ]


def advantages(manifest: Manifest) -> list[float]:
    return np.asarray(manifest.advantage.as_numpy()).tolist()


def loss_weights(manifest: Manifest) -> list[float]:
    return np.asarray(manifest.loss_weight.as_numpy()).tolist()
