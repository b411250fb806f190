"""Work that waits outside its queue: until a retry is due, or as long as a long task gives signs of life.

RabbitMQ takes back what is not acknowledged for `consumer_timeout`, and knows no delayed redelivery. Such a message is
acknowledged and written down here; when its time has come, the dispatcher puts it into its queue again.
"""

from __future__ import annotations

import time
from typing import Final

import msgspec

from broker.rabbitmq.state import FolderState

_PREFIX: Final = "parked--"


class Parked(msgspec.Struct, frozen=True, kw_only=True):
    """A message and when it is due."""

    durable: str
    sequence: int
    num_delivered: int
    due_unix_s: float
    """By the clock of whoever wrote it: clocks of several machines must agree to a fraction of the ack wait."""


class ParkedWork:
    """All of a run's, in its state folder."""

    def __init__(self, state: FolderState) -> None:
        self._state: Final = state

    async def put(self, parked: Parked) -> None:
        """Write down, or write down anew with a later time."""
        await self._state.save(_key(parked.durable, parked.sequence), msgspec.msgpack.encode(parked), None)

    async def remove(self, durable: str, sequence: int) -> None:
        """It is done."""
        await self._state.delete(_key(durable, sequence))

    async def all(self) -> list[Parked]:
        """Everything that waits."""
        found: list[Parked] = []
        for key in await self._state.keys(_PREFIX):
            value = await self._state.load(key)
            if value is not None:
                found.append(msgspec.msgpack.decode(value[0], type=Parked))
        return found

    async def due(self) -> list[Parked]:
        """What must be handed out again now."""
        now_s = time.time()
        return [parked for parked in await self.all() if parked.due_unix_s <= now_s]


def _key(durable: str, sequence: int) -> str:
    return f"{_PREFIX}{durable}--{sequence}"
