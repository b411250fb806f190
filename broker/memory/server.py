"""What lasts: the runs' logs, states, payloads and the talk between brokers, shared by every broker of one server."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping

import anyio

from broker.api import ConsumerSettings, Published, Record
from broker.clock import Clock, SystemClock
from broker.errors import StoreFullError, TooLargeError, TopologyError
from broker.memory.durable import Durable
from broker.memory.payloads import MemoryPayloads
from schemas.subjects import matches

RECORD_OVERHEAD_BYTES = 64
"""Counted per message besides subject and data, so that a full store can be played."""

Handler = Callable[[bytes], Awaitable[bytes]]


class MemoryRun:
    """One run's log, state and payloads."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.first = 1
        self.last = 0
        self.size_bytes = 0
        self.by_sequence: dict[int, Record] = {}
        self.by_subject: dict[str, Record] = {}
        self.durables: dict[str, Durable] = {}
        self.state: dict[str, tuple[bytes, int]] = {}
        self.state_revision = 0
        self.payloads = MemoryPayloads()

    def append(self, subject: str, data: bytes, headers: Mapping[str, str]) -> Published:
        """Create a message, once."""
        stands = self.by_subject.get(subject)
        if stands is not None:
            same = stands.data == data
            return Published(sequence=stands.sequence, created=False, standing=None if same else stands.data)
        size = _size_bytes(subject, data)
        if 0 <= self.max_bytes < self.size_bytes + size:
            raise StoreFullError(
                f"the log holds {self.size_bytes} of {self.max_bytes} bytes and refuses {subject!r} ({size} bytes): "
                "purge it or raise its limit"
            )
        self.last += 1
        record = Record(subject=subject, sequence=self.last, data=data, unix_time_s=time.time(), headers=dict(headers))
        self.by_sequence[self.last] = record
        self.by_subject[subject] = record
        self.size_bytes += size
        return Published(sequence=self.last, created=True)

    def durable(self, name: str, filters: tuple[str, ...], settings: ConsumerSettings) -> Durable:
        """The durable of that name.

        Raises:
            TopologyError: it stands there with other settings.
        """
        found = self.durables.get(name)
        if found is None:
            found = self.durables[name] = Durable(name, filters, settings)
            return found
        wanted = (sorted(filters), settings.ack_wait_s, settings.max_ack_pending)
        stands = (sorted(found.filters), found.settings.ack_wait_s, found.settings.max_ack_pending)
        if wanted != stands:
            raise TopologyError(
                f"durable {name!r}: expected (filters, ack_wait_s, max_ack_pending) = {wanted}, found {stands}"
            )
        return found

    def purge_below(self, sequence: int, pattern: str = "") -> int:
        """Drop the messages below `sequence`, with `pattern` only those that it matches."""
        below = (s for s in self.by_sequence if s < sequence)
        gone = [s for s in below if not pattern or matches(pattern, self.by_sequence[s].subject)]
        for s in gone:
            record = self.by_sequence.pop(s)
            del self.by_subject[record.subject]
            self.size_bytes -= _size_bytes(record.subject, record.data)
        self.first = min(self.by_sequence, default=self.last + 1)
        for durable in self.durables.values():
            durable.forget_below(self.first)
        return len(gone)


class MemoryServer:
    """Runs by name, and who listens to or serves which subject."""

    def __init__(
        self, *, clock: Clock | None = None, max_bytes: int = -1, max_payload_bytes: int = 8 * 1024 * 1024
    ) -> None:
        self.clock: Clock = SystemClock() if clock is None else clock
        self.max_payload_bytes = max_payload_bytes
        self.listeners: dict[int, tuple[str, Callable[[str, bytes], None]]] = {}
        self.servers: dict[str, list[Handler]] = {}
        self._max_bytes = max_bytes
        self._runs: dict[str, MemoryRun] = {}
        self._changed = anyio.Event()
        self._next_id = 0
        self.clock.on_move(self.wake)

    def run(self, name: str) -> MemoryRun:
        """The run of that name, made on first use."""
        return self._runs.setdefault(name, MemoryRun(self._max_bytes))

    def new_id(self) -> int:
        """A number that no other worker or listener of this server has."""
        self._next_id += 1
        return self._next_id

    def check_size(self, subject: str, data: bytes, headers: Mapping[str, str]) -> None:
        """Raise TooLargeError for what a real server would refuse."""
        size = len(data) + sum(len(k) + len(v) + 4 for k, v in headers.items())
        if size > self.max_payload_bytes:
            raise TooLargeError(
                f"{subject!r}: expected at most {self.max_payload_bytes} bytes with headers, found {size}: "
                "store the large part as a payload"
            )

    def wake(self) -> None:
        """Something changed: let all who wait look."""
        event, self._changed = self._changed, anyio.Event()
        event.set()

    async def changed(self, until_s: float | None = None) -> None:
        """Wait for the next change, or until the clock shows `until_s`."""
        event = self._changed
        if until_s is None:
            await event.wait()
            return
        with anyio.move_on_after(self.clock.delay_s(until_s)):
            await event.wait()


def _size_bytes(subject: str, data: bytes) -> int:
    return len(subject) + len(data) + RECORD_OVERHEAD_BYTES
