"""Writes a recording: append-only, whole blocks, a new file when one is large enough. Blocking; for one thread.

A payload is written before the messages that name it, so whatever can be read after a crash is complete in itself, and
a recorder goes on after the last sequence that stands in the file. Memory does not grow with the file: of what was written
only the places of the blocks are kept, and the ids of the newest payloads.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO, Final

import msgspec

from broker.api import Record
from broker.batches import batch_of
from broker.recording.blocks import PAYLOAD_BLOCK_BYTES, PackedBlock, encode_payloads, message_compressor, pack_messages
from broker.recording.errors import NotARecordingError, RecordingError, WrongRunError
from broker.recording.filelock import lock_file
from broker.recording.frames import PRELUDE_BYTES, FramePlace, Kind, encode_frame, prelude
from broker.recording.header import Header, encode_header, read_header
from broker.recording.index import LoadedIndex, load_index
from broker.recording.index_file import BlockPlaces, write_index

_IDS_REMEMBERED: Final = 1 << 17
"""Payload ids by which a payload that is named again is known to stand in the recording."""


def check_no_folder(path: Path) -> None:
    """Raise NotARecordingError for a folder."""
    if path.is_dir():
        raise NotARecordingError(f"{path}: expected a recording's file, such as run.hrrec, found a folder")


def part_path(path: Path, part: int) -> Path:
    """The file of a recording's `part`: run.hrrec, run.0001.hrrec, run.0002.hrrec and so on."""
    return path if part == 0 else path.with_name(f"{path.stem}.{part:04d}{path.suffix}")


def part_paths(path: Path) -> list[Path]:
    """All files of the recording that begins with `path`, in order."""
    found = [path]
    while (following := part_path(path, len(found))).exists():
        found.append(following)
    return found


class RecordingWriter:
    """An open recording. `last_sequence` and `holds` say what is in it already."""

    def __init__(self, path: Path, header: Header, lock: BinaryIO, *, rotate_bytes: int, ids_remembered: int) -> None:
        self.path: Final = path
        self._lock: Final = lock
        self.last_sequence = 0
        self.num_messages = 0
        self._payload_ids: Final[dict[bytes, None]] = {}
        self._rotate_bytes: Final = rotate_bytes
        self._ids_remembered: Final = ids_remembered
        self._header = header
        self._places = BlockPlaces()
        self._file: BinaryIO | None = None
        self._offset = 0
        self._compressor: Final = message_compressor()

    @property
    def size_bytes(self) -> int:
        """Size of the file that is written now."""
        return self._offset

    def holds(self, payload_id: str) -> bool:
        """Whether a payload is known to be written already. One that is written again, long after, does no harm."""
        return bytes.fromhex(payload_id) in self._payload_ids

    def _remember(self, raw_id: bytes) -> None:
        self._payload_ids[raw_id] = None
        if len(self._payload_ids) > self._ids_remembered:
            del self._payload_ids[next(iter(self._payload_ids))]

    def write_payloads(self, payloads: Sequence[tuple[str, bytes | memoryview]]) -> None:
        """Append payloads that are not there yet, several small ones to a block."""
        block: list[tuple[str, bytes | memoryview]] = []
        size = 0
        for payload_id, data in payloads:
            raw_id = bytes.fromhex(payload_id)
            if raw_id in self._payload_ids:
                continue
            self._remember(raw_id)
            block.append((payload_id, data))
            size += len(data)
            if size >= PAYLOAD_BLOCK_BYTES:
                self._append(Kind.PAYLOADS, *encode_payloads(block))
                block, size = [], 0
        if block:
            self._append(Kind.PAYLOADS, *encode_payloads(block))

    def write_messages(self, records: Sequence[Record], missing: Sequence[str] = ()) -> None:
        """Append messages in the order of their sequences, in blocks. What the file holds already is left out.

        Args:
            missing: ids of payloads they name that could not be had.
        """
        fresh = records
        if records and records[0].sequence <= self.last_sequence:
            fresh = [record for record in records if record.sequence > self.last_sequence]
        if fresh:
            self.write_packed(pack_messages(batch_of(fresh), missing))

    def write_packed(self, blocks: Sequence[PackedBlock]) -> None:
        """Append packed blocks that follow on what the file holds."""
        for block in blocks:
            self._append(Kind.MESSAGES, block.head, self._compressor.compress(block.raw))
            self.last_sequence = block.last_sequence
            self.num_messages += block.count
            if self._offset >= self._rotate_bytes:
                self._rotate()

    def close(self) -> None:
        """Write the index and close; another writer may have the recording then."""
        try:
            self._end_file()
        finally:
            self._lock.close()

    def _end_file(self) -> None:
        if self._file is None:
            return
        file, self._file = self._file, None
        with file:
            write_index(file, self._offset, self._places)
            file.flush()
            os.fsync(file.fileno())

    def _append(self, kind: Kind, head: bytes, body: bytes) -> None:
        if self._file is None:
            raise RecordingError(f"{self.path}: the recording is closed")
        pieces = encode_frame(kind, head, body)
        self._file.writelines(pieces)
        self._file.flush()
        place = FramePlace(
            offset=self._offset,
            kind=kind,
            head_size=len(head),
            body_size=len(body),
            checksum=int.from_bytes(pieces[1], "little"),
        )
        self._offset = place.end
        self._places.add(place)

    def _begin(self, path: Path) -> None:
        self._file = path.open("r+b" if path == self.path else "x+b")  # the first one stands already, for its lock
        self._file.write(prelude())
        self._offset = PRELUDE_BYTES
        self._places = BlockPlaces()
        self._append(Kind.HEADER, b"", encode_header(self._header))

    def _rotate(self) -> None:
        self._end_file()
        self._header = msgspec.structs.replace(self._header, part=self._header.part + 1)
        self._begin(part_path(self.path, self._header.part))

    def _resume(self, path: Path, loaded: LoadedIndex) -> None:
        self._file = path.open("r+b")
        self._file.truncate(loaded.blocks_end)
        self._file.seek(loaded.blocks_end)
        self._offset = loaded.blocks_end
        self._places = BlockPlaces()
        for place in loaded.index.places():
            self._places.add(place)

    def _take_up(self, loaded: LoadedIndex) -> None:
        for entry in loaded.index.payloads:
            ids = entry.head.ids
            for start in range(0, len(ids), 16):
                self._remember(ids[start : start + 16])
        for entry in loaded.index.messages:
            self.last_sequence = max(self.last_sequence, entry.head.last_sequence)
            self.num_messages += entry.head.count

    @classmethod
    def open(
        cls, path: Path, header: Header, *, rotate_bytes: int = 1 << 62, ids_remembered: int = _IDS_REMEMBERED
    ) -> RecordingWriter:
        """Begin a recording, or go on with the one that stands at `path`: a torn tail is cut off, nothing else changes.

        Args:
            rotate_bytes: a new file begins when one is this large.
            ids_remembered: payloads by whose ids one that is named again is known.

        Raises:
            WrongRunError: what stands there is of another run, or was redacted by other rules.
            RecordingInUseError: another process writes it.
            NotARecordingError, NewerRecordingError.
        """
        check_no_folder(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = lock_file(path)
        try:
            writer = cls(path, header, lock, rotate_bytes=rotate_bytes, ids_remembered=ids_remembered)
            if path.stat().st_size == 0:
                writer._begin(path)
            else:
                writer._go_on(path, header)
        except BaseException:
            lock.close()
            raise
        return writer

    def _go_on(self, path: Path, header: Header) -> None:
        names = part_paths(path)
        if len(names) > 1 and not _has_header(names[-1]):
            names.pop().unlink()  # a rotation that a crash cut short before its first block
        for name in names:
            with name.open("rb") as file:
                self._header = read_header(file, str(name))
                _check_same(self._header, header, str(name))
                loaded = load_index(file, str(name))
            self._take_up(loaded)
            if name is names[-1]:
                self._resume(name, loaded)


def _has_header(path: Path) -> bool:
    with path.open("rb") as file:
        try:
            read_header(file, str(path))
        except NotARecordingError:
            return False
    return True


def _check_same(standing: Header, wanted: Header, path: str) -> None:
    if standing.run != wanted.run:
        raise WrongRunError(
            f"{path}: holds a recording of run {standing.run!r}, asked to append run {wanted.run!r}: choose another file"
        )
    if standing.redactions != wanted.redactions:
        raise WrongRunError(
            f"{path}: was recorded with the redaction rules {standing.redactions}, asked to append with "
            f"{wanted.redactions}: give the same rules or another file"
        )
