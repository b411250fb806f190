"""Fan-out: one issued group becomes one requested episode per slot."""

from __future__ import annotations

from pipeline.stage import stage
from schemas.messages.sampling import EpisodeRequested, GroupIssued
from schemas.topics import EPISODE_REQUESTED, GROUP_ISSUED


@stage(consumes=GROUP_ISSUED, produces=(EPISODE_REQUESTED,))
async def fan_out(issued: GroupIssued) -> list[EpisodeRequested]:
    """Ask for the first attempt at each slot of a group."""
    return [
        EpisodeRequested(
            group=issued.group,
            slot=slot,
            attempt=0,
            stream=issued.stream,
            data_id=issued.data_id,
            tags=issued.tags,
            prompt=issued.prompt,
            min_version=issued.min_version,
            evaluation=issued.evaluation,
        )
        for slot in range(issued.num_slots)
    ]
