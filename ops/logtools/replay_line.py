"""The line of records that a replay's publishers take from: in order, in time, with their payloads stored before.

It must not know what publishing is.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from typing import Final

import anyio
import anyio.to_thread
import msgspec

from broker.api import Record

_READ_AHEAD: Final = 2048
_FLYING_BYTES: Final = 16 * 1024 * 1024
"""Below what a connection lets fly, so that no publisher waits for room out of turn."""
_LONGEST_SLEEP_S: Final = 0.5


class Place(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A record and its number in the line."""

    number: int
    record: Record


class Line:
    """Hands records out one after the other, and checks that they were stored in that order."""

    def __init__(
        self,
        records: Iterator[Record],
        *,
        needs_preparation: Callable[[Record], bool],
        prepare: Callable[[Record], Awaitable[None]],
        pause: Callable[[Record], Awaitable[None]],
        due_s: Callable[[Record, Record], float] | None,
    ) -> None:
        """Args:
        prepare: awaited before a record is handed out, where `needs_preparation`.
        pause: awaited after a record was handed out, before the next.
        due_s: when a record is due, in seconds after the first; None = at once.
        """
        self._records: Final = records
        self._needs_preparation: Final = needs_preparation
        self._prepare: Final = prepare
        self._pause: Final = pause
        self._due_s: Final = due_s
        self._ahead: Final[deque[Record]] = deque()
        self._busy = False
        self._changed = anyio.Event()
        self._head_is_ready = False
        self._ended = False
        self._number = 0
        self._flying_bytes = 0
        self._freed = anyio.Event()
        self._last: Record | None = None
        self._first: Record | None = None
        self._started_s = 0.0
        self._stored: Final[dict[int, int]] = {}
        self._checked = 0
        self._last_sequence = 0

    def take(self) -> Place | None:
        """The next record, if it can be had without any wait."""
        if self._busy or not self._ahead:
            return None
        record = self._ahead[0]
        if not self._head_is_ready and (
            self._due_s is not None
            or self._is_pause_due()
            or self._flying_bytes + len(record.data) > _FLYING_BYTES
            or self._needs_preparation(record)
        ):
            return None
        self._head_is_ready = False
        self._ahead.popleft()
        place = Place(number=self._number, record=record)
        self._number += 1
        self._flying_bytes += len(record.data)
        self._last = record
        return place

    async def next(self) -> Place | None:
        """The next record, ready to be published; None at the end."""
        while (place := self.take()) is None:
            if self._busy:
                await self._changed.wait()
                continue
            if self._ended and not self._ahead:
                return None
            # One publisher makes the head ready, the others wait for it together: no queue of hand-overs.
            self._busy = True
            self._changed = anyio.Event()
            try:
                await self._make_ready()
            finally:
                self._busy = False
                self._changed.set()
        return place

    async def _make_ready(self) -> None:
        if self._last is not None and self._is_pause_due():
            last, self._last = self._last, None
            await self._pause(last)
        if not self._ahead:
            self._ahead.extend(await anyio.to_thread.run_sync(self._read_some))
            self._ended = not self._ahead
        if not self._ahead:
            return
        record = self._ahead[0]
        await self._wait_until_due(record)
        if self._needs_preparation(record):
            await self._prepare(record)
        while self._flying_bytes and self._flying_bytes + len(record.data) > _FLYING_BYTES:
            self._freed = anyio.Event()
            await self._freed.wait()
        self._head_is_ready = True

    def settle(self, place: Place, sequence: int) -> bool:
        """A record was stored at `sequence`; False if the order of the line was not kept."""
        self._flying_bytes -= len(place.record.data)
        self._freed.set()
        self._stored[place.number] = sequence
        while (found := self._stored.pop(self._checked, None)) is not None:
            if found <= self._last_sequence:
                return False
            self._last_sequence = found
            self._checked += 1
        return True

    def _is_pause_due(self) -> bool:
        return self._last is not None and ".step.assembled." in self._last.subject

    async def _wait_until_due(self, record: Record) -> None:
        if self._due_s is None:
            return
        if self._first is None:
            self._first, self._started_s = record, time.monotonic()
        due = self._started_s + self._due_s(record, self._first)
        while (left := due - time.monotonic()) > 0:
            await anyio.sleep(min(left, _LONGEST_SLEEP_S))

    def _read_some(self) -> list[Record]:
        return list(itertools.islice(self._records, _READ_AHEAD))
