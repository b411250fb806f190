"""The newest messages of a log, kept in memory: who reads at the log's end needs no reader of his own. Pure."""

from __future__ import annotations

from typing import Final

from broker.api import Record

MAX_BYTES: Final = 16 * 1024 * 1024
MAX_RECORDS: Final = 16_384


class Tail:
    """Records with consecutive sequences."""

    def __init__(self, *, max_bytes: int = MAX_BYTES, max_records: int = MAX_RECORDS) -> None:
        self._records: list[Record] = []
        self._first = 1
        self._size_bytes = 0
        self._max_bytes: Final = max_bytes
        self._max_records: Final = max_records

    @property
    def first(self) -> int:
        """The sequence of the oldest record that is kept."""
        return self._first

    @property
    def size_bytes(self) -> int:
        """Of subjects and data."""
        return self._size_bytes

    def add(self, record: Record) -> None:
        """The log's next record. One that does not follow begins anew."""
        if record.sequence != self._first + len(self._records):
            self._records.clear()
            self._size_bytes = 0
            self._first = record.sequence
        self._records.append(record)
        self._size_bytes += _size_bytes(record)
        if len(self._records) > self._max_records or self._size_bytes > self._max_bytes:
            self._drop(max(len(self._records) // 4, 1))

    def get(self, sequence: int) -> Record | None:
        """A record, if it is still here."""
        place = sequence - self._first
        return self._records[place] if 0 <= place < len(self._records) else None

    def forget_below(self, sequence: int) -> None:
        """The log was purged."""
        self._drop(min(max(sequence - self._first, 0), len(self._records)))

    def _drop(self, count: int) -> None:
        for record in self._records[:count]:
            self._size_bytes -= _size_bytes(record)
        del self._records[:count]
        self._first += count


def _size_bytes(record: Record) -> int:
    return len(record.subject) + len(record.data)
