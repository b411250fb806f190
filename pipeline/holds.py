"""Holds on a run's log: whoever reads old messages asks that they stay, for as long as it renews its wish.

    async with held(broker, "recorder", sequence=1, what="recorder of run.hrrec") as hold:
        first = max(1, hold.purged_below)      what lay below is gone already
        ...
        hold.move(done + 1)                    told soon, and again before it runs out

A hold is a last value, so it outlives the one who purges. It counts until it is released or was not renewed for its time to
live, by the clock of whoever purges: a clock that jumps ends no hold. This module must not know what is read.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from typing import Final

import anyio
import msgspec
import structlog

from broker.api import Broker
from broker.errors import BrokerError, NotAllowedError
from schemas.ids import encode_token
from schemas.messages.sampling import LogHold, Retain

log = structlog.get_logger("headrace.holds")

HOLDS: Final = "hold"
"""First token of the keys of holds."""
MARK_KEY: Final = "retain"
"""Last value: the newest `Retain`, saved before anything is purged."""
MOVE_PERIOD_S: Final = 2.0
"""How soon a moved hold is told."""


class Hold:
    """A hold of this process. Made by `held`."""

    def __init__(self, broker: Broker, key: str, what: str, sequence: int, ttl_s: float) -> None:
        self.purged_below = 0
        """What lay below was purged before the hold began, or is going to be."""
        self.is_held = True
        """False: these credentials may not hold; whoever purges does not know of this reader."""
        self._broker: Final = broker
        self._key: Final = key
        self._what: Final = what
        self._ttl_s: Final = ttl_s
        self._sequence = sequence
        self._told = -1

    @property
    def sequence(self) -> int:
        """The first message that must stay."""
        return self._sequence

    def move(self, sequence: int) -> None:
        """Nothing below `sequence` is needed any more; going back is not possible."""
        self._sequence = max(self._sequence, sequence)

    async def begin(self) -> None:
        """Ask for it, then look how far the log was purged before."""
        try:
            await self._tell()
        except NotAllowedError as error:
            self.is_held = False
            log.warning("this reader can't hold the log: what it has not read may be purged", reason=str(error))
        mark = await read_mark(self._broker)
        self.purged_below = 0 if mark is None else mark.sequence

    async def keep(self) -> None:
        """Renew it for ever, sooner where it was moved."""
        while self.is_held:
            with anyio.move_on_after(self._ttl_s / 3):
                await anyio.sleep(min(MOVE_PERIOD_S, self._ttl_s / 3))
                while self._told == self._sequence:
                    await anyio.sleep(min(MOVE_PERIOD_S, self._ttl_s / 3))
            try:
                await self._tell()
            except BrokerError as error:
                log.warning("a hold on the log could not be renewed", hold=self._what, error=str(error))

    async def release(self) -> None:
        """It is needed no more."""
        if self.is_held:
            try:
                await self._tell(released=True)
            except BrokerError as error:
                log.warning("a hold on the log could not be released: it runs out", hold=self._what, error=str(error))

    async def _tell(self, *, released: bool = False) -> None:
        sequence = self._sequence
        wish = LogHold(what=self._what, sequence=sequence, ttl_s=self._ttl_s, released=released)
        await self._broker.save_state(self._key, msgspec.msgpack.encode(wish))
        self._told = sequence


@asynccontextmanager
async def held(
    broker: Broker, name: str, *, sequence: int, what: str, ttl_s: float = 60.0, own: bool = True
) -> AsyncGenerator[Hold]:
    """Hold the log from `sequence` on while the context is open.

    Args:
        name: of the reader.
        sequence: the first message that must stay; `Hold.purged_below` says what was gone already.
        what: who holds, for people: it is shown beside the low-water mark.
        ttl_s: how long it counts after this process died.
        own: False: all readers of that name share one hold, the latest counts (a recorder that goes on with its file).

    Raises:
        BrokerError: the broker is away.
    """
    key = f"{HOLDS}.{encode_token(name)}" + (f".{secrets.token_hex(6)}" if own else "")
    hold = Hold(broker, key, what, sequence, ttl_s)
    await hold.begin()
    failure: Exception | None = None
    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(hold.keep)
            try:
                yield hold
            except Exception as error:  # noqa: BLE001 - raised below as itself: a task group would wrap it
                failure = error
            tasks.cancel_scope.cancel()
        if failure is not None:
            raise failure
    finally:
        with anyio.CancelScope(shield=True), anyio.move_on_after(2.0):
            await hold.release()


async def read_mark(broker: Broker) -> Retain | None:
    """The low-water mark that was saved last: what lies below was purged, or is going to be."""
    found = await broker.load_state(MARK_KEY)
    return None if found is None else msgspec.msgpack.decode(found[0], type=Retain)


class HoldWatch:
    """Which holds count, for whoever purges: by its own clock, from when it first saw a renewal."""

    def __init__(self) -> None:
        self._seen: Final[dict[str, tuple[int, float]]] = {}

    def look(self, states: Mapping[str, tuple[bytes, int]], now_s: float) -> tuple[dict[str, LogHold], list[str]]:
        """Those that count, by key, and the keys that may be forgotten.

        Args:
            states: all holds as they stand.
            now_s: monotonic clock.
        """
        counting: dict[str, LogHold] = {}
        over: list[str] = []
        for key, (data, revision) in states.items():
            if self._seen.get(key, (0, 0.0))[0] != revision:
                self._seen[key] = (revision, now_s)
            hold = msgspec.msgpack.decode(data, type=LogHold)
            if hold.released or now_s - self._seen[key][1] > hold.ttl_s:
                over.append(key)
            else:
                counting[key] = hold
        for key in [key for key in self._seen if key not in states]:
            del self._seen[key]
        return counting, over
