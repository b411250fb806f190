"""Registrations that dead launch workers left behind, and which of them no running episode goes through."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from pipeline.log import RunLog
from schemas.messages.rollout import EpisodeEnded, EpisodeLaunched
from schemas.topics import EPISODE_ENDED, EPISODE_LAUNCHED


class LeftNames(msgspec.Struct, frozen=True, kw_only=True):
    """Names that episodes of the log were launched through."""

    unused: list[str]
    used: list[str]
    """An episode that has not ended runs through them: whoever takes it over keeps its registration alive."""


async def left_names(log: RunLog, is_wanted: Callable[[str], bool]) -> LeftNames:
    """The wanted ones among all names that the log knows, whichever gateway they stand for."""
    names: set[str] = set()
    open_through: dict[tuple[str, int, int], str] = {}
    async with log.read([EPISODE_LAUNCHED, EPISODE_ENDED], follow=False) as entries:
        async for entry in entries:
            match entry.message:
                case EpisodeLaunched() as launched if launched.model_name in names or is_wanted(launched.model_name):
                    names.add(launched.model_name)
                    open_through[launched.group, launched.slot, launched.attempt] = launched.model_name
                case EpisodeEnded() as ended:
                    open_through.pop((ended.group, ended.slot, ended.attempt), None)
                case _:
                    pass
    used = set(open_through.values())
    return LeftNames(unused=sorted(names - used), used=sorted(used))
