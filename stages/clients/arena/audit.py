"""The audit record of an episode: everything needed to ask the Arena about it later. Pure; holds no credential."""

from __future__ import annotations

import msgspec

from schemas.config_arena import StreamConfig
from schemas.messages.rollout import EpisodeEnded


class AuditRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One episode, kept or rejected."""

    stream: str
    stream_id: str
    group: str
    slot: int
    attempt: int
    final: bool
    data_id: str
    task_id: str
    session: str
    status: str
    outcome: str
    """Its class: scored, model, system or unknown."""
    expected_reward_ref: str | None
    """"key@version", where the run pins one."""
    score: float | None
    """The Arena's raw score."""
    training_reward: float | None
    """None when rejected."""
    raw: msgspec.Raw | None
    """The grader's own object; None above the configured size."""
    raw_size_bytes: int
    artifacts_uri: str
    trace_id: str
    computed_at: str
    error: str
    seconds: float


def audit_record(ended: EpisodeEnded, stream: StreamConfig | None, training_reward: float | None) -> AuditRecord:
    """The record of an ended episode.

    Args:
        ended: As it stands on the log.
        stream: Its stream's config, where it is known.
        training_reward: What the reward mapping made of its score; None when it was rejected.
    """
    ref = None if stream is None else stream.expected_reward_ref
    return AuditRecord(
        stream=ended.stream,
        stream_id="" if stream is None else stream.stream_id,
        group=ended.group,
        slot=ended.slot,
        attempt=ended.attempt,
        final=ended.final,
        data_id=ended.data_id,
        task_id=ended.task_id,
        session=ended.session,
        status=ended.status,
        outcome=ended.outcome.value,
        expected_reward_ref=None if ref is None else f"{ref.key}@{ref.version}",
        score=ended.score,
        training_reward=training_reward,
        raw=msgspec.Raw(ended.raw_json) if ended.raw_json else None,
        raw_size_bytes=ended.raw_size_bytes,
        artifacts_uri=ended.artifacts_uri,
        trace_id=ended.trace_id,
        computed_at=ended.computed_at,
        error=ended.error,
        seconds=ended.seconds,
    )
