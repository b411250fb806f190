"""What weight broadcast asks for, over a run's log. Light: every stage worker imports it."""

from __future__ import annotations

from typing import Final

from pipeline.generations import Generations
from pipeline.log import RunLog
from schemas.messages.training import WeightsPublished
from schemas.topics import WEIGHTS_PUBLISHED


class LogWeights:
    """What weight broadcast published before."""

    def __init__(self, log: RunLog) -> None:
        self._log: Final = log

    async def find(self, version: int, generation: int) -> WeightsPublished | None:
        return await self._log.find(WEIGHTS_PUBLISHED, version, generation)


async def published_generations(log: RunLog) -> Generations:
    """The trainers whose weights were published so far."""
    generations = Generations()
    async with log.read([WEIGHTS_PUBLISHED], follow=False) as entries:
        async for entry in entries:
            if isinstance(entry.message, WeightsPublished):
                generations.admits(entry.message.generation)
    return generations
