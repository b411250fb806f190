"""The audit records of a run's log: one per ended episode, kept or rejected."""

from __future__ import annotations

from collections.abc import AsyncIterator

import msgspec

from ops.logtools.sources import LogSource
from schemas.config_arena import StreamConfig
from schemas.messages.rollout import EpisodeEnded
from schemas.topics import EPISODE_ENDED, RUN_STARTED, TRAJECTORY_READY
from stages.clients.arena.audit import AuditRecord, audit_record


class _KnownStreams(msgspec.Struct, frozen=True, kw_only=True):
    """What the record needs of a run's config."""

    streams: list[StreamConfig] = []


async def audit_records(source: LogSource) -> AsyncIterator[AuditRecord]:
    """All records, in the order in which the episodes ended."""
    streams: dict[str, StreamConfig] = {}
    ended: list[EpisodeEnded] = []
    rewards: dict[tuple[str, int, int], float | None] = {}
    subjects = [topic.filter(source.run) for topic in (RUN_STARTED, EPISODE_ENDED, TRAJECTORY_READY)]
    seen: set[str] = set()
    async for record in source.read(subjects):
        if record.subject in seen:  # the first message of a key counts
            continue
        seen.add(record.subject)
        topic = ".".join(record.subject.split(".")[2:4])
        if topic == RUN_STARTED.name:
            known = msgspec.json.decode(RUN_STARTED.decode(record.data).config_json, type=_KnownStreams)
            streams.update({stream.name: stream for stream in known.streams})
        elif topic == EPISODE_ENDED.name:
            ended.append(EPISODE_ENDED.decode(record.data))
        else:
            trajectory = TRAJECTORY_READY.decode(record.data)
            reward = None if trajectory.rejected else trajectory.reward
            rewards[trajectory.group, trajectory.slot, trajectory.attempt] = reward
    for episode in ended:
        reward = rewards.get((episode.group, episode.slot, episode.attempt))
        yield audit_record(episode, streams.get(episode.stream), reward)
