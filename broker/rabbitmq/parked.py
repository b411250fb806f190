"""Work that waits outside its queue: until a retry is due, or as long as a long task gives signs of life.

RabbitMQ takes back what is not acknowledged for `consumer_timeout`, and knows no delayed redelivery. Such a message is
acknowledged and written down here; when its time has come, the dispatcher puts it into its queue again.
"""

from __future__ import annotations

import secrets
import time
from pathlib import Path
from typing import Final

import anyio.to_thread
import msgspec

from broker.errors import StoreFullError


class Parked(msgspec.Struct, frozen=True, kw_only=True):
    """A message and when it is due."""

    durable: str
    sequence: int
    num_delivered: int
    due_unix_s: float
    """By the clock of whoever wrote it: clocks of several machines must agree to a fraction of the ack wait."""


class ParkedWork:
    """All of a run's: a file each, in a folder that all workers share."""

    def __init__(self, folder: Path) -> None:
        self._folder: Final = folder

    async def put(self, parked: Parked) -> None:
        """Write down, or write down anew with a later time."""
        await anyio.to_thread.run_sync(self._put, parked)

    async def remove(self, parked: Parked) -> None:
        """It is done, or lies in its queue again. What a later delivery of it left here stays."""
        path = self._path(parked)
        await anyio.to_thread.run_sync(lambda: path.unlink(missing_ok=True))

    async def all(self) -> list[Parked]:
        """Everything that waits."""
        return await anyio.to_thread.run_sync(self._all)

    async def due(self) -> list[Parked]:
        """What must be handed out again now."""
        now_s = time.time()
        return [parked for parked in await self.all() if parked.due_unix_s <= now_s]

    def _path(self, parked: Parked) -> Path:
        return self._folder / f"{parked.durable}.{parked.sequence}.{parked.num_delivered}"

    def _put(self, parked: Parked) -> None:
        path = self._path(parked)
        beside = self._folder / f".{secrets.token_hex(8)}"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            beside.write_bytes(msgspec.msgpack.encode(parked))
            beside.replace(path)
        except OSError as error:
            beside.unlink(missing_ok=True)
            raise StoreFullError(f"work can't be parked under {self._folder}: {error.strerror}") from error

    def _all(self) -> list[Parked]:
        found: list[Parked] = []
        try:
            paths = [path for path in self._folder.iterdir() if not path.name.startswith(".")]
        except FileNotFoundError:
            return found
        for path in paths:
            try:
                found.append(msgspec.msgpack.decode(path.read_bytes(), type=Parked))
            except FileNotFoundError:
                continue  # done meanwhile
        return found
