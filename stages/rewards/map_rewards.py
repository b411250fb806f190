"""Reward mapping: an episode's end, with the calls of its session, becomes the slot's one trajectory.

    episode.ended ─▶ wait for the whole session ─▶ rows (forest) ─▶ rewards on the completions that earned them ─▶ payloads ─▶ trajectory.ready

A failed episode becomes a rejected trajectory; one that cannot be read whole is never trained on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import anyio
import msgspec

from pipeline.delivery import RetryPolicy
from pipeline.errors import RefusedError
from pipeline.sessions import SessionRecord
from pipeline.stage import Outputs, stage
from schemas import arrays
from schemas.ids import row_id
from schemas.messages.rollout import (
    EpisodeClass,
    EpisodeEnded,
    InteractionTokens,
    Row,
    RowTokens,
    Trajectory,
)
from schemas.topics import EPISODE_ENDED, TRAJECTORY_READY
from stages.ports import Payloads
from stages.rewards.forest import BuiltRow, RewardError, SharedTokens, Style, build_rows
from stages.rewards.transforms import StreamReward, training_reward


class SessionStore(Protocol):
    """Whole sessions, waited for."""

    async def read_session(self, session: str) -> SessionRecord:
        """Raises DeadlineError when a part of it is missing for too long."""
        ...


class RewardSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How rewards are mapped."""

    export: Style
    turn_discount: float
    """Of turn rewards (and of a score over `individual` rows), walking back in the order of creation."""
    shared_tokens: SharedTokens
    rewards: Mapping[str, StreamReward]
    expected_rewards: Mapping[str, str] = {}
    """stream → the "key@version" that its episodes must have been launched under. A run that goes on with another pinned reward does not
    mix scores of both; an episode that does not say its reward is not doubted."""
    solved_threshold: float = 1.0
    """A slot counts as solved from this raw score on, where its stream has no threshold of its own."""


def gave_up(ended: EpisodeEnded, reason: str) -> Outputs:
    """An end that went to the dead letters still gives its slot a (rejected) trajectory, so that its group can close."""
    return [_rejected(ended, f"reward mapping gave up: {reason}")] if ended.final else []


@stage(
    consumes=EPISODE_ENDED,
    produces=(TRAJECTORY_READY,),
    policy=RetryPolicy(max_attempts=3, max_deliveries=8),
    concurrency=128,
    gave_up=gave_up,
)
async def map_rewards(
    ended: EpisodeEnded, *, sessions: SessionStore, payloads: Payloads, settings: RewardSettings
) -> list[Trajectory]:
    """Put an episode's reward on the completions that earned it; a failed episode becomes a rejected trajectory.

    Raises:
        DeadlineError: the session is not whole on the log yet.
        RefusedError: a reward that names an unknown interaction, or a transform that gave no finite number.
    """
    if not ended.final:
        return []
    if ended.outcome not in (EpisodeClass.SCORED, EpisodeClass.MODEL):
        return [_rejected(ended, f"{ended.status}: {ended.error}".strip(": "))]
    if not ended.session:
        return [_rejected(ended, "no session")]
    record = await sessions.read_session(ended.session)
    if record.closed.system_error:
        return [_rejected(ended, f"gateway: {record.closed.system_error}")]
    expected = settings.expected_rewards.get(ended.stream)
    if expected is not None and ended.reward_key and ended.reward_key != expected:
        return [_rejected(ended, f"launched under reward {ended.reward_key}, expected {expected}")]
    if not record.interactions:
        return [_rejected(ended, "no model call")]
    reward = settings.rewards.get(ended.stream)
    if reward is None:
        raise RefusedError(f"stream {ended.stream!r} is in no [[streams]] table of this run")
    return [await _trajectory(ended, record, reward, payloads, settings)]


async def _trajectory(
    ended: EpisodeEnded, record: SessionRecord, reward: StreamReward, payloads: Payloads, settings: RewardSettings
) -> Trajectory:
    tokens: dict[int, InteractionTokens] = {}

    async def fetch(ordinal: int) -> None:
        data = await payloads.get(record.interactions[ordinal].tokens)
        tokens[ordinal] = msgspec.msgpack.decode(data, type=InteractionTokens)

    async with anyio.create_task_group() as tasks:
        for interaction in record.interactions:
            tasks.start_soon(fetch, interaction.ordinal)
    score = ended.score if ended.score is not None else 0.0
    facts = {"stream": ended.stream, "data_id": ended.data_id, "tags": ended.tags, "status": ended.status}
    episode_reward = training_reward(score, facts, reward)
    try:
        built = build_rows(
            record.interactions,
            tokens,
            style=settings.export,
            shared_tokens=settings.shared_tokens,
            score=None if ended.turn_rewards else episode_reward,
            turn_rewards={key: training_reward(value, facts, reward) for key, value in ended.turn_rewards.items()}
            or None,
            discount=settings.turn_discount if ended.turn_rewards or settings.export == "individual" else None,
        )
    except RewardError as error:
        raise RefusedError(str(error)) from error
    rows: list[Row] = []
    for index, row in enumerate(built):
        rows.append(await _store(ended, index, row, payloads))
    solved_from = settings.solved_threshold if reward.threshold is None else reward.threshold
    return Trajectory(
        group=ended.group,
        slot=ended.slot,
        attempt=ended.attempt,
        session=ended.session,
        stream=ended.stream,
        data_id=ended.data_id,
        outcome=ended.outcome,
        rejected=False,
        rows=rows,
        score=ended.score,
        reward=episode_reward if not ended.turn_rewards else sum(row.reward for row in rows) / len(rows),
        rewards_per_completion=bool(ended.turn_rewards) or settings.export == "individual",
        solved=score >= solved_from,
        evaluation=ended.evaluation,
        num_interactions=len(record.interactions),
        num_completion_tokens=sum(interaction.num_completion for interaction in record.interactions),
    )


async def _store(ended: EpisodeEnded, index: int, row: BuiltRow, payloads: Payloads) -> Row:
    data = msgspec.msgpack.encode(
        RowTokens(
            token_ids=arrays.int32(row.token_ids),
            loss_mask=arrays.bits(row.loss_mask),
            logprobs=arrays.float32(row.logprobs),
            versions=arrays.runs(row.versions),
            turns=arrays.runs(row.turns),
        )
    )
    return Row(
        row=row_id(ended.group, ended.slot, index),
        tokens=await payloads.put(data),
        num_tokens=len(row.token_ids),
        num_loss_tokens=row.num_loss_tokens,
        min_version=row.min_version,
        max_version=row.max_version,
        reward=0.0 if row.reward is None else row.reward,
        turn_rewards=list(row.turn_rewards),
        truncated=row.truncated,
        temperature=row.temperature,
    )


def _rejected(ended: EpisodeEnded, reason: str) -> Trajectory:
    return Trajectory(
        group=ended.group,
        slot=ended.slot,
        attempt=ended.attempt,
        session=ended.session,
        stream=ended.stream,
        data_id=ended.data_id,
        outcome=ended.outcome,
        rejected=True,
        reason=reason[:500],
        score=ended.score,
        evaluation=ended.evaluation,
    )
