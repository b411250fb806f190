"""Reads a recording, all its files as one: in order, from a sequence, a time or a step, by subject, payloads by id.

Whatever is damaged is named in `damages` and stepped over. Blocking; memory is one block.
"""

from __future__ import annotations

import glob
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Final, Self

import msgspec
import zstandard

from broker.api import Record
from broker.errors import PayloadMissingError
from broker.recording.blocks import MessageBlock, decode_payloads, topic_and_entity
from broker.recording.errors import NewerRecordingError, NotARecordingError
from broker.recording.frames import Damage, FramePlace, read_frame
from broker.recording.header import Header, read_header
from broker.recording.index import Lookup, MessageEntry, PayloadEntry, entities_of, load_index
from broker.recording.writer import check_no_folder, part_path, part_paths
from schemas.payload import INLINE, PayloadRef, check_payload
from schemas.subjects import matches

_PAYLOAD_BLOCKS_KEPT: Final = 4


class TopicSummary(msgspec.Struct, frozen=True, kw_only=True):
    """How much of a topic a recording holds."""

    messages: int
    size_bytes: int


def _lost_parts(names: Sequence[Path], run: str) -> list[Damage]:
    """A part that is not there though a later one is: what is in those can't be read."""
    first, missing = names[0], part_path(names[0], len(names))
    for later in sorted(first.parent.glob(f"{glob.escape(first.stem)}.[0-9][0-9][0-9][0-9]{first.suffix}")):
        if later in names:
            continue
        try:
            with later.open("rb") as file:
                header = read_header(file, str(later))
        except (NotARecordingError, NewerRecordingError):
            continue
        if header.run == run and header.part > len(names):
            reason = f"this part is not there, {later.name} and what follows it is not read"
            return [Damage(path=str(missing), offset=0, size_bytes=0, reason=reason)]
    return []


class Gap(msgspec.Struct, frozen=True, kw_only=True):
    """Sequences that are not in the recording."""

    after_sequence: int
    before_sequence: int

    @property
    def num_missing(self) -> int:
        """How many sequences lie between."""
        return self.before_sequence - self.after_sequence - 1


class Recording:
    """An open recording. Use as a context manager."""

    def __init__(self, path: Path) -> None:
        """Open all files.

        Raises:
            NotARecordingError, NewerRecordingError, FileNotFoundError.
        """
        check_no_folder(path)
        self.path: Final = path
        self.damages: Final[list[Damage]] = []
        self.complete = True
        """Every file was closed properly."""
        self._files: Final[list[BinaryIO]] = []
        self._at_index: Final[list[FramePlace | None]] = []
        self._names: Final = part_paths(path)
        self._topics: dict[str, TopicSummary] | None = None
        self._cache: Final[dict[int, dict[str, memoryview]]] = {}
        messages: list[tuple[int, MessageEntry]] = []
        payloads: list[tuple[int, PayloadEntry]] = []
        try:
            headers = [self._open(number, name, messages, payloads) for number, name in enumerate(self._names)]
        except BaseException:
            self.close()
            raise
        self.header: Final[Header] = headers[0]
        self.damages.extend(_lost_parts(self._names, self.header.run))
        self.lookup: Final = Lookup(messages, payloads, self._entities)

    def _open(
        self,
        number: int,
        name: Path,
        messages: list[tuple[int, MessageEntry]],
        payloads: list[tuple[int, PayloadEntry]],
    ) -> Header:
        file = name.open("rb")
        self._files.append(file)
        header = read_header(file, str(name))
        loaded = load_index(file, str(name))
        self._at_index.append(loaded.at_index)
        messages += [(number, entry) for entry in loaded.index.messages]
        payloads += [(number, entry) for entry in loaded.index.payloads]
        self.damages.extend(loaded.damages)
        self.complete = self.complete and loaded.complete
        return header

    def _entities(self) -> list[bytes]:
        found: list[bytes] = []
        for number, file in enumerate(self._files):
            entries = [entry for of_file, entry in self.lookup.messages if of_file == number]
            found += entities_of(file, self._at_index[number], entries)
        return found

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the files."""
        for file in self._files:
            file.close()

    @property
    def run(self) -> str:
        """The run that was recorded."""
        return self.header.run

    @property
    def num_files(self) -> int:
        """1, or more when it was rotated."""
        return len(self._files)

    @property
    def num_messages(self) -> int:
        """Messages in sound blocks."""
        return sum(entry.head.count for _, entry in self.lookup.messages)

    @property
    def num_payloads(self) -> int:
        """Payloads in sound blocks."""
        return sum(len(entry.head.ids) // 16 for _, entry in self.lookup.payloads)

    @property
    def last_sequence(self) -> int:
        """The last message's sequence, 0 for none."""
        return self.lookup.messages[-1][1].head.last_sequence if self.lookup.messages else 0

    def size_bytes(self) -> int:
        """Size of all its files."""
        return sum(name.stat().st_size for name in self._names)

    def topics(self) -> dict[str, TopicSummary]:
        """Messages and bytes by topic, from the index alone."""
        if self._topics is not None:
            return self._topics
        found: dict[str, TopicSummary] = {}
        for _, entry in self.lookup.messages:
            for topic, count in entry.head.topics.items():
                former = found.get(topic)
                found[topic] = TopicSummary(
                    messages=count.messages + (former.messages if former else 0),
                    size_bytes=count.size_bytes + (former.size_bytes if former else 0),
                )
        self._topics = dict(sorted(found.items()))
        return self._topics

    def missing_payloads(self) -> list[str]:
        """Payloads that were gone before they could be recorded."""
        return [payload_id for _, entry in self.lookup.messages for payload_id in entry.head.missing]

    def gaps(self) -> list[Gap]:
        """Where sequences are missing: purged before they were recorded, filtered out, or damaged."""
        gaps: list[Gap] = []
        last = 0
        for number, (_, entry) in enumerate(self.lookup.messages):
            head = entry.head
            if head.first_sequence > last + 1:
                gaps.append(Gap(after_sequence=last, before_sequence=head.first_sequence))
            if head.last_sequence - head.first_sequence + 1 != head.count:
                block = self._block(number)
                sequences = [] if block is None else block.sequences.tolist()
                gaps += [
                    Gap(after_sequence=a, before_sequence=b) for a, b in itertools.pairwise(sequences) if b != a + 1
                ]
            last = head.last_sequence
        return gaps

    def records(
        self,
        filters: Sequence[str] = (),
        *,
        after_sequence: int = 0,
        to_sequence: int | None = None,
        from_time_s: float | None = None,
        to_time_s: float | None = None,
    ) -> Iterator[Record]:
        """Messages in order.

        Args:
            filters: subject patterns with `*` and `>`; none = all.
            after_sequence: only later ones.
            to_sequence: the last one that may come.
            from_time_s: only what was stored then or later, unix time.
            to_time_s: only what was stored before.
        """
        start = self.lookup.after(after_sequence)
        if from_time_s is not None:
            start = max(start, self.lookup.from_time(from_time_s))
        for number in self._candidates(filters, start):
            head = self.lookup.messages[number][1].head
            if to_sequence is not None and head.first_sequence > to_sequence:
                return
            block = self._block(number)
            if block is None:
                continue
            for place, subject in enumerate(block.subjects):
                sequence, stored = int(block.sequences[place]), float(block.times[place])
                if sequence <= after_sequence or (to_sequence is not None and sequence > to_sequence):
                    continue
                if (from_time_s is not None and stored < from_time_s) or (
                    to_time_s is not None and stored >= to_time_s
                ):
                    continue
                if not filters or any(matches(pattern, subject) for pattern in filters):
                    yield block.record(place)

    def _candidates(self, filters: Sequence[str], start: int) -> Sequence[int]:
        """Message blocks that may hold something of the filters."""
        everything = range(start, len(self.lookup.messages))
        if not filters:
            return everything
        wanted: set[int] = set()
        for pattern in filters:
            topic, entity = topic_and_entity(pattern)
            if entity and not set(entity) & {"*", ">"}:
                wanted.update(self._with_topic(topic, self.lookup.with_entity(entity)))
            else:
                wanted.update(self._with_topic(topic, everything))
        return sorted(number for number in wanted if number >= start)

    def _with_topic(self, pattern: str, numbers: Sequence[int]) -> list[int]:
        if pattern in ("", ">", "*.*"):
            return list(numbers)
        wanted = {topic for topic in self.topics() if matches(pattern, topic)}
        return [number for number in numbers if not wanted.isdisjoint(self.lookup.messages[number][1].head.topics)]

    def records_of_group(self, group: str) -> Iterator[Record]:
        """Every message whose key begins with a group or with a session, row or other id made from it."""
        prefix = f"{group}-"
        for number in self.lookup.with_entity(group):
            block = self._block(number)
            if block is None:
                continue
            for place, subject in enumerate(block.subjects):
                entity = topic_and_entity(subject)[1]
                if entity == group or entity.startswith(prefix):
                    yield block.record(place)

    def first_sequence_of_step(self, step: int) -> int:
        """Where the part of the log begins that became step `step`: after the manifest of the step before."""
        before = [
            mark.sequence
            for mark in self.lookup.step_marks()
            if mark.topic == "step.assembled" and mark.step == step - 1
        ]
        return before[0] + 1 if before else 1

    def last_sequence_of_step(self, step: int) -> int:
        """The last message that belongs to a step: its manifest, its training, its weights; 0 if there is none."""
        return max((mark.sequence for mark in self.lookup.step_marks() if mark.step == step), default=0)

    def payload(self, ref: PayloadRef) -> memoryview:
        """The bytes of a reference, checked.

        Raises:
            PayloadMissingError: not in the recording.
            DigestError: not what the reference promises.
        """
        if ref.store == INLINE and ref.inline is not None:
            check_payload(ref, ref.inline)
            return ref.inline
        number = self.lookup.payload_block(ref.id)
        found = None if number is None else self._payloads(number).get(ref.id)
        if found is None:
            raise PayloadMissingError(
                f"payload {ref.id} ({ref.size_bytes} bytes) is not in {self.path}: it was collected before it could be "
                "recorded, left out on purpose, or its block is damaged"
            )
        check_payload(ref, found)
        return found

    def _payloads(self, number: int) -> dict[str, memoryview]:
        found = self._cache.get(number)
        if found is None:
            file, entry = self.lookup.payloads[number]
            body = self._payload_body(file, entry)
            found = {} if body is None else decode_payloads(entry.head, body)
            while len(self._cache) >= _PAYLOAD_BLOCKS_KEPT:
                del self._cache[next(iter(self._cache))]
            self._cache[number] = found
        return found

    def _block(self, number: int) -> MessageBlock | None:
        file, entry = self.lookup.messages[number]
        lost = f"sequences {entry.head.first_sequence} to {entry.head.last_sequence} are not read"
        body = self._body(file, entry.place, lost)
        if body is None:
            return None
        try:
            return MessageBlock(body)
        except (zstandard.ZstdError, msgspec.MsgspecError) as error:
            self._note(file, entry.place, f"a block can't be decompressed, {lost}: {error}")
            return None

    def _payload_body(self, file: int, entry: PayloadEntry) -> memoryview | None:
        return self._body(file, entry.place, f"{len(entry.head.ids) // 16} payloads are not read")

    def _body(self, file: int, place: FramePlace, lost: str) -> memoryview | None:
        found = read_frame(self._files[file], place)
        if found is None:
            self._note(file, place, f"a block's checksum is wrong, {lost}")
            return None
        return found[1]

    def _note(self, file: int, place: FramePlace, reason: str) -> None:
        damage = Damage(
            path=str(self._names[file]), offset=place.offset, size_bytes=place.end - place.offset, reason=reason
        )
        if damage not in self.damages:
            self.damages.append(damage)

    def verify(self) -> list[Damage]:
        """Read every block; all damages of the recording."""
        for number in range(len(self.lookup.messages)):
            self._block(number)
        for file, entry in self.lookup.payloads:
            self._payload_body(file, entry)
        return self.damages
