"""Registrations that dead launch workers left behind, and which of them no running episode goes through."""

from __future__ import annotations

from collections.abc import Iterable

from pipeline.log import RunLog
from schemas.messages.rollout import EpisodeEnded, EpisodeLaunched
from schemas.topics import EPISODE_ENDED, EPISODE_LAUNCHED


async def unused_names(log: RunLog, names: Iterable[str]) -> list[str]:
    """Those of the names through which no episode of the log runs that has not ended: whoever takes such an episode over
    keeps its registration alive, and removes it afterwards.
    """
    wanted = set(names)
    if not wanted:
        return []
    open_through: dict[tuple[str, int, int], str] = {}
    async with log.read([EPISODE_LAUNCHED, EPISODE_ENDED], follow=False) as entries:
        async for entry in entries:
            match entry.message:
                case EpisodeLaunched() as launched if launched.model_name in wanted:
                    open_through[launched.group, launched.slot, launched.attempt] = launched.model_name
                case EpisodeEnded() as ended:
                    open_through.pop((ended.group, ended.slot, ended.attempt), None)
                case _:
                    pass
    return sorted(wanted - set(open_through.values()))
