"""What a gateway knows of its run's online slots: the fold of `stages.online.slots`, kept at the log's end."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import anyio

from pipeline.log import Entry, RunLog
from schemas.messages.sampling import EpisodeRequested
from schemas.subjects import Topic
from schemas.topics import (
    EPISODE_ENDED,
    EPISODE_REQUESTED,
    GROUP_CLOSED,
    SESSION_CLAIMED,
    SESSION_CLOSED,
    SESSION_OPENED,
    SESSION_REWARDED,
)
from stages.online.slots import OnlineSlots

_TOPICS: Final[tuple[Topic[Any], ...]] = (
    EPISODE_REQUESTED,
    EPISODE_ENDED,
    GROUP_CLOSED,
    SESSION_CLAIMED,
    SESSION_OPENED,
    SESSION_CLOSED,
    SESSION_REWARDED,
)


class SlotView:
    """The slots, and who waits for them to change."""

    def __init__(self, run_log: RunLog, streams: Iterable[str]) -> None:
        self._log: Final = run_log
        self.slots: Final = OnlineSlots(streams)
        self.sequence = 0
        """Everything of the log up to here is in the slots."""
        self._changed = anyio.Event()
        self._offered = anyio.Event()

    async def follow(self) -> None:
        """Read the log from its beginning, for ever."""
        async with self._log.read(_TOPICS) as entries:
            async for entry in entries:
                self._take(entry)

    async def catch_up(self) -> None:
        """Return when everything is in that stands on the log now."""
        async with self._log.read(_TOPICS, after_sequence=self.sequence, follow=False) as entries:
            last = self.sequence
            async for entry in entries:
                last = entry.sequence
        await self.seen(last)

    async def seen(self, sequence: int) -> None:
        """Return when a message of this log position is in."""
        while self.sequence < sequence:
            await self._changed.wait()

    @property
    def offered(self) -> anyio.Event:
        """Set when another slot is asked for after this look, or when woken."""
        return self._offered

    def wake(self) -> None:
        """Let all who wait for a slot look again."""
        self._offered.set()
        self._offered = anyio.Event()

    def _take(self, entry: Entry) -> None:
        self.slots.take(entry.message, entry.unix_time_s)
        self.sequence = entry.sequence
        self._changed.set()
        self._changed = anyio.Event()
        if isinstance(entry.message, EpisodeRequested):
            self.wake()
