"""How one durable hands out a log's messages: the position, what is out, what is due again. Synchronous and pure
but for the clock reading that it is given.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable
from typing import Final

from broker.api import ConsumerSettings, ConsumerStatus, Record
from broker.naming import any_matches

NOBODY: Final = 0
"""The worker of a message that nobody holds; real ones count from 1."""


class Outstanding:
    """A message that was handed out and is not acknowledged."""

    __slots__ = ("again", "num_delivered", "postponed", "record", "worker")

    def __init__(self, record: Record) -> None:
        self.record = record
        self.worker = NOBODY
        self.num_delivered = 0
        self.postponed = 0
        """How often it was given a new time: only the latest counts."""
        self.again = False
        """Whether it waits to be handed out again."""


class Durable:
    """The state of one durable consumer."""

    def __init__(self, name: str, filters: tuple[str, ...], settings: ConsumerSettings) -> None:
        self.name = name
        self.filters = filters
        self.settings = settings
        self.out: dict[int, Outstanding] = {}
        self.waiting = 0
        self._position = 0
        self._delivered = 0
        self._due: list[tuple[float, int, int]] = []
        self._again: list[int] = []
        self._held: Counter[int] = Counter()

    def take(self, worker: int, now_s: float, log: Callable[[int], Record | None], last: int) -> Outstanding | None:
        """Hand out one message: first what is due again, then the next of the log."""
        self._expire(now_s)
        if self._held[worker] >= self.settings.prefetch:
            return None
        item = self.out.get(heapq.heappop(self._again)) if self._again else self._take_next(log, last)
        if item is not None:
            self._give(item, worker)
            item.num_delivered += 1
            self.postpone(item, now_s + self.settings.ack_wait_s)
        return item

    def _expire(self, now_s: float) -> None:
        """What is due belongs to nobody any more and goes out again, the oldest first."""
        while self._due and self._due[0][0] <= now_s:
            item = self._latest(*heapq.heappop(self._due)[1:])
            if item is not None and not item.again:
                self._give(item, NOBODY)
                item.again = True
                heapq.heappush(self._again, item.record.sequence)
        while self._again and not self._waits(self._again[0]):
            heapq.heappop(self._again)

    def _waits(self, sequence: int) -> bool:
        item = self.out.get(sequence)
        return item is not None and item.again

    def _latest(self, sequence: int, postponed: int) -> Outstanding | None:
        """The message, if this is still the time it is due."""
        item = self.out.get(sequence)
        return item if item is not None and item.postponed == postponed else None

    def _give(self, item: Outstanding, worker: int) -> None:
        self._held[item.worker] -= 1
        self._held[worker] += 1
        item.worker = worker
        item.again = False

    def _take_next(self, log: Callable[[int], Record | None], last: int) -> Outstanding | None:
        if len(self.out) >= self.settings.max_ack_pending:
            return None
        while self._position < last:
            self._position += 1
            record = log(self._position)
            if record is not None and any_matches(self.filters, record.subject):
                self._delivered = self._position
                item = Outstanding(record)
                self.out[self._position] = item
                return item
        return None

    def postpone(self, item: Outstanding, due_s: float) -> None:
        """Deliver `item` again at `due_s` unless it is acknowledged before."""
        if self.out.get(item.record.sequence) is item:
            item.postponed += 1
            heapq.heappush(self._due, (due_s, item.record.sequence, item.postponed))

    def ack(self, item: Outstanding) -> None:
        """Done; also when it was meanwhile handed to somebody else."""
        if self.out.pop(item.record.sequence, None) is not None:
            self._held[item.worker] -= 1

    def give_back(self, item: Outstanding, due_s: float) -> None:
        """Its worker holds `item` no longer: deliver it again at `due_s`."""
        if item.record.sequence in self.out:
            self._give(item, NOBODY)
            self.postpone(item, due_s)

    def next_due_s(self) -> float | None:
        """When the next message is due again."""
        while self._due:
            due_s, sequence, postponed = self._due[0]
            if self._latest(sequence, postponed) is not None:
                return due_s
            heapq.heappop(self._due)
        return None

    def forget_below(self, sequence: int) -> None:
        """The log was purged below `sequence`."""
        for gone in [s for s in self.out if s < sequence]:
            self._held[self.out.pop(gone).worker] -= 1
        self._position = max(self._position, sequence - 1)

    def status(self, log: Callable[[int], Record | None], last: int) -> ConsumerStatus:
        """Where it stands."""
        pending = sum(
            1
            for sequence in range(self._position + 1, last + 1)
            if (record := log(sequence)) is not None and any_matches(self.filters, record.subject)
        )
        return ConsumerStatus(
            durable=self.name,
            filters=list(self.filters),
            delivered=self._delivered,
            ack_floor=min(self.out, default=self._delivered + 1) - 1,
            num_pending=pending,
            num_ack_pending=len(self.out),
            num_redelivered=sum(1 for item in self.out.values() if item.num_delivered > 1),
            num_waiting=self.waiting,
        )
