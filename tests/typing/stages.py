"""What the type checker must accept and refuse of stages. Checked by pyright, run by nobody.

Each ignore below is an error that must be there: an unnecessary one is an error itself.
"""

# pyright: reportUnnecessaryTypeIgnoreComment=true

from __future__ import annotations

from pipeline.stage import BoundStage, bind, stage
from schemas.messages.rollout import EpisodeEnded
from schemas.messages.sampling import EpisodeRequested, GroupIssued
from schemas.topics import EPISODE_REQUESTED, GROUP_ISSUED

GROUP = GroupIssued(group="g", ordinal=0, stream="s", data_id="d", num_slots=1)


def _request(issued: GroupIssued) -> EpisodeRequested:
    return EpisodeRequested(group=issued.group, slot=0, attempt=0, stream=issued.stream, data_id=issued.data_id)


@stage(consumes=GROUP_ISSUED, produces=(EPISODE_REQUESTED,))
async def good(issued: GroupIssued, *, width: int) -> list[EpisodeRequested]:
    """Takes what its topic carries."""
    return [] if width > issued.num_slots else [_request(issued)]


bound: BoundStage[GroupIssued] = bind(good, width=3)

bind(good)  # pyright: ignore[reportCallIssue]
bind(good, width="3")  # pyright: ignore[reportArgumentType]
bind(good, width=3, depth=1)  # pyright: ignore[reportCallIssue]


@stage(consumes=GROUP_ISSUED, produces=(EPISODE_REQUESTED,))  # pyright: ignore[reportArgumentType]
async def takes_another_message(ended: EpisodeEnded) -> list[EpisodeRequested]:
    """Its topic carries GroupIssued."""
    return [_request(GROUP)] if ended.final else []


@stage(consumes=GROUP_ISSUED)  # pyright: ignore[reportArgumentType]
async def gives_no_messages(issued: GroupIssued) -> int:
    """A stage gives a sequence of messages."""
    return issued.num_slots
