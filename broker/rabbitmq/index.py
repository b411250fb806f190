"""What a stream of written messages amounts to: the first message of each subject, numbered from 1. Pure.

A stream queue refuses nothing, so two messages of one subject may lie in it. All who read it see them in the same order and
drop the later ones: numbers, contents and positions are the same everywhere.
"""

from __future__ import annotations

from array import array
from enum import StrEnum
from typing import Final

import msgspec

from broker.topology import DurableSpec
from schemas.subjects import matches

_GONE: Final = ""
"""In place of the subject of a message that was purged from between others."""


class Kind(StrEnum):
    """What a message of the stream is."""

    MESSAGE = "m"
    PURGE = "p"
    """Its body is the lowest sequence that is kept, its subject a pattern or empty."""
    MARK = "k"
    """Nothing but a place: whoever wrote it knows that all before it is read."""
    DURABLE = "d"
    """Its body declares a durable; the first declaration of a name stands."""


class Standing(msgspec.Struct, frozen=True):
    """The message that stands on a subject."""

    sequence: int
    digest: int
    """64-bit xxh3 of its bytes."""


class IndexSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """An index as bytes, so that a process need not read the stream from its beginning."""

    next_offset: int
    first_sequence: int
    subjects: list[str]
    offsets: bytes
    """[N] int64 of the messages `first_sequence` …, as digests and sizes."""
    digests: bytes
    """[N] uint64."""
    sizes: bytes
    """[N] int64, bytes."""
    durables: list[DurableSpec]


class LogIndex:
    """The fold."""

    def __init__(self) -> None:
        self.first_sequence = 1
        self.next_offset = 0
        """The offset in the stream up to which all is folded."""
        self.size_bytes = 0
        self.durables: Final[dict[str, DurableSpec]] = {}
        self._by_subject: dict[str, int] = {}
        self._subjects: list[str] = []
        self._offsets = array("q")
        self._digests = array("Q")
        self._sizes = array("q")

    @property
    def last_sequence(self) -> int:
        """Of the newest message, 0 before the first."""
        return self.first_sequence + len(self._subjects) - 1

    def __len__(self) -> int:
        return len(self._by_subject)

    def accept(self, offset: int, subject: str, digest: int, size_bytes: int) -> int:
        """Take a message in; its sequence, or 0 if its subject is taken or it was folded before."""
        if offset < self.next_offset:
            return 0
        self.next_offset = offset + 1
        if subject in self._by_subject:
            return 0
        self._subjects.append(subject)
        self._offsets.append(offset)
        self._digests.append(digest)
        self._sizes.append(size_bytes)
        self.size_bytes += size_bytes
        sequence = self.last_sequence
        self._by_subject[subject] = sequence
        return sequence

    def pass_over(self, offset: int) -> bool:
        """A message that is none of the log; whether it is seen for the first time."""
        if offset < self.next_offset:
            return False
        self.next_offset = offset + 1
        return True

    def declare(self, spec: DurableSpec) -> None:
        """Take a durable's declaration in; the first of a name stands."""
        self.durables.setdefault(spec.name, spec)

    def purge_below(self, sequence: int, pattern: str = "") -> int:
        """Forget the messages below `sequence`, with `pattern` only those that it matches; how many there were."""
        before = len(self)
        for place in range(min(max(sequence - self.first_sequence, 0), len(self._subjects))):
            subject = self._subjects[place]
            if subject and (not pattern or matches(pattern, subject)):
                del self._by_subject[subject]
                self.size_bytes -= self._sizes[place]
                self._subjects[place] = _GONE
        self._drop_gone()
        return before - len(self)

    def _drop_gone(self) -> None:
        """The messages that are gone at the beginning."""
        count = next((place for place, subject in enumerate(self._subjects) if subject), len(self._subjects))
        del self._subjects[:count], self._offsets[:count], self._digests[:count], self._sizes[:count]
        self.first_sequence += count

    def find(self, subject: str) -> Standing | None:
        """The message that stands on a subject."""
        sequence = self._by_subject.get(subject)
        if sequence is None:
            return None
        return Standing(sequence, self._digests[sequence - self.first_sequence])

    def offset_of(self, sequence: int) -> int:
        """Where a message lies; for a number above the last, where the next one will, and below the first, where that lies."""
        place = max(sequence - self.first_sequence, 0)
        return self._offsets[place] if place < len(self._offsets) else self.next_offset

    def subject_of(self, sequence: int) -> str:
        """The subject of a message, empty if it is none of those that are kept."""
        place = sequence - self.first_sequence
        return self._subjects[place] if 0 <= place < len(self._subjects) else _GONE

    def snapshot(self) -> IndexSnapshot:
        """All of it."""
        return IndexSnapshot(
            next_offset=self.next_offset,
            first_sequence=self.first_sequence,
            subjects=list(self._subjects),
            offsets=self._offsets.tobytes(),
            digests=self._digests.tobytes(),
            sizes=self._sizes.tobytes(),
            durables=list(self.durables.values()),
        )

    @classmethod
    def restored(cls, snapshot: IndexSnapshot) -> LogIndex:
        """The index of a snapshot."""
        index = cls()
        index.next_offset = snapshot.next_offset
        index.first_sequence = snapshot.first_sequence
        index._subjects = list(snapshot.subjects)
        index._offsets.frombytes(snapshot.offsets)
        index._digests.frombytes(snapshot.digests)
        index._sizes.frombytes(snapshot.sizes)
        index._by_subject = {
            subject: snapshot.first_sequence + place for place, subject in enumerate(snapshot.subjects) if subject
        }
        index.size_bytes = sum(size for size, subject in zip(index._sizes, index._subjects, strict=True) if subject)
        index.durables.update({spec.name: spec for spec in snapshot.durables})
        return index
