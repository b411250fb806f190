"""Everything of one session on the log, waited for: reward mapping begins when it has read all of it."""

from __future__ import annotations

from typing import Final, TypeVar

import anyio
import msgspec

from pipeline.errors import DeadlineError
from pipeline.log import RunLog
from schemas.messages.rollout import InteractionRecorded, SessionClosed
from schemas.subjects import Topic
from schemas.topics import INTERACTION_RECORDED, SESSION_CLOSED

M = TypeVar("M", bound=msgspec.Struct)
_FIRST_LOOK_S: Final = 0.02
_MAX_LOOK_S: Final = 1.0


class SessionRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A whole session."""

    closed: SessionClosed
    interactions: list[InteractionRecorded]
    """By ordinal, 0 … closed.num_interactions - 1."""


class SessionReader:
    """Reads sessions by their keys."""

    def __init__(self, log: RunLog, *, deadline_s: float) -> None:
        self._log: Final = log
        self._deadline_s: Final = deadline_s

    async def read_session(self, session: str) -> SessionRecord:
        """The session's end and all its interactions.

        Raises:
            DeadlineError: they were not all on the log in time; names what is missing.
        """
        missing = f"session.closed.{session}"
        with anyio.move_on_after(self._deadline_s):
            closed = await self._wait(SESSION_CLOSED, session)
            interactions: list[InteractionRecorded] = []
            for ordinal in range(closed.num_interactions):
                missing = f"interaction.recorded.{session}.{ordinal}"
                interactions.append(await self._wait(INTERACTION_RECORDED, session, ordinal))
            return SessionRecord(closed=closed, interactions=interactions)
        raise DeadlineError(f"waited {self._deadline_s:g} s for {missing}, which its gateway should send")

    async def _wait(self, topic: Topic[M], *key: str | int) -> M:
        delay_s = _FIRST_LOOK_S
        while (message := await self._log.find(topic, *key)) is None:
            await anyio.sleep(delay_s)
            delay_s = min(_MAX_LOOK_S, 2 * delay_s)
        return message
