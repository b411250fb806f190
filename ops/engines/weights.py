"""The weights that a joining engine needs, read off the log, and those that come later."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Final

import anyio
import structlog

from pipeline.log import RunLog
from schemas.messages.training import WeightsPublished
from schemas.topics import WEIGHTS_PUBLISHED
from stages.weights.receive import Receiver, not_superseded

log = structlog.get_logger("headrace.engine")

_TRIED: Final = 4
"""Newest versions that a joining engine tries: older ones are not kept."""


class FollowedWeights:
    """Keeps an engine's receiver supplied with what stands on the log."""

    def __init__(
        self,
        run_log: RunLog,
        receiver: Receiver,
        *,
        beside: Callable[[], Coroutine[object, object, None]] | None = None,
    ) -> None:
        """Args:
        beside: runs while the engine serves.
        """
        self._log: Final = run_log
        self._beside: Final = beside
        self._receiver: Final = receiver
        self._sequence = 0
        """Up to where the log was read."""

    @property
    def refused_version(self) -> int:
        """The newest version that could not be loaded, or -1."""
        return self._receiver.refused_version

    async def catch_up(self) -> None:
        """Bring the engine to the newest version that can be loaded; where none can, wait for one that can.

        A version that is damaged for everybody must not keep a new engine out: the one before it is what the others serve.
        """
        published: list[WeightsPublished] = []
        async with self._log.read([WEIGHTS_PUBLISHED], follow=False) as entries:
            async for entry in entries:
                self._sequence = entry.sequence
                if isinstance(entry.message, WeightsPublished):
                    published.append(entry.message)
        newest = sorted(not_superseded(published), key=lambda one: (one.version, one.generation), reverse=True)[:_TRIED]
        if not newest:
            return
        self._receiver.offer(newest[0])
        for one in newest:
            if await self._receiver.load(one):
                return
        log.warning("none of the newest weights can be loaded; waiting for others", newest=newest[0].version)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self.follow)
            await self._receiver.loaded.wait()
            tasks.cancel_scope.cancel()

    async def follow(self) -> None:
        """Load what is published, for ever."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._receiver.run)
            if self._beside is not None:
                tasks.start_soon(self._beside)
            async with self._log.read([WEIGHTS_PUBLISHED], after_sequence=self._sequence) as entries:
                async for entry in entries:
                    self._sequence = entry.sequence
                    if isinstance(entry.message, WeightsPublished):
                        self._receiver.offer(entry.message)
