"""Frames: how bytes stand in a recording file so that a torn or damaged one is found and stepped over.

    prelude  8 bytes magic, u16 format, 6 bytes zero
    frame    marker 4 | kind u8, 3 zero | head size u32 | zero u32 | body size u64 | xxh3-64 u64 | head | body

The checksum covers the frame's own header, head and body. Nothing here knows what heads and bodies mean.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from enum import IntEnum
from mmap import mmap
from typing import BinaryIO, Final

import msgspec
import xxhash

from broker.recording.errors import NewerRecordingError, NotARecordingError

MAGIC: Final = b"\x93HRREC\r\n"
FORMAT: Final = 1
MARKER: Final = b"\xf5HRf"

_PRELUDE: Final = struct.Struct("<8sH6x")
_FRAME: Final = struct.Struct("<4sB3xI4xQQ")
_CHECKED: Final = _FRAME.size - 8
PRELUDE_BYTES: Final = _PRELUDE.size
FRAME_BYTES: Final = _FRAME.size
_SEARCH_BYTES: Final = 1 << 20


class Kind(IntEnum):
    """What a frame holds."""

    HEADER = 1
    MESSAGES = 2
    PAYLOADS = 3
    INDEX = 4
    END = 5


# Entries of an index are made by the thousand when a file is opened and hold no cycles: gc=False, here and in blocks and index.
class FramePlace(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Where a frame stands in its file."""

    offset: int
    kind: int
    head_size: int
    body_size: int
    checksum: int

    @property
    def end(self) -> int:
        """The offset after it."""
        return self.offset + FRAME_BYTES + self.head_size + self.body_size


class Damage(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of a file that can't be read."""

    path: str
    offset: int
    size_bytes: int
    reason: str


def prelude() -> bytes:
    """How a file of this format begins."""
    return _PRELUDE.pack(MAGIC, FORMAT)


def check_prelude(file: BinaryIO, path: str) -> int:
    """The format of the file.

    Raises:
        NotARecordingError, NewerRecordingError.
    """
    file.seek(0)
    raw = file.read(PRELUDE_BYTES)
    if len(raw) < PRELUDE_BYTES or raw[:8] != MAGIC:
        raise NotARecordingError(f"{path}: expected a headrace recording, found {raw[:8]!r} at its start")
    number: int = _PRELUDE.unpack(raw)[1]
    if number > FORMAT:
        raise NewerRecordingError(
            f"{path}: written in recording format {number}; this version reads formats up to {FORMAT}. "
            "Upgrade headrace to read it"
        )
    return number


def encode_frame(kind: Kind, head: bytes, body: bytes | memoryview) -> list[bytes | memoryview]:
    """The pieces of a frame, to be written one after the other."""
    start = frame_start(kind, len(head), len(body))
    return [start, _checksum(start, head, body).to_bytes(8, "little"), head, body]


def frame_start(kind: Kind, head_size: int, body_size: int) -> bytes:
    """What stands before a frame's checksum, and what its checksum begins with."""
    return _FRAME.pack(MARKER, kind, head_size, body_size, 0)[:_CHECKED]


def _checksum(start: bytes, head: bytes, body: bytes | memoryview) -> int:
    hasher = xxhash.xxh3_64(start)
    hasher.update(head)
    hasher.update(body)
    return hasher.intdigest()


def place_at(file: BinaryIO, offset: int, size: int) -> FramePlace | None:
    """The frame that seems to begin at `offset` of a file of `size` bytes; None if none does or it is not whole."""
    file.seek(offset)
    raw = file.read(FRAME_BYTES)
    if len(raw) < FRAME_BYTES:
        return None
    marker, kind, head_size, body_size, checksum = _FRAME.unpack(raw)
    if marker != MARKER:
        return None
    place = FramePlace(offset=offset, kind=kind, head_size=head_size, body_size=body_size, checksum=checksum)
    return place if place.end <= size else None


def read_head(file: BinaryIO, place: FramePlace) -> bytes:
    """A frame's head, unchecked: for building an index without reading bodies."""
    file.seek(place.offset + FRAME_BYTES)
    return file.read(place.head_size)


def read_frame(file: BinaryIO, place: FramePlace) -> tuple[bytes, memoryview] | None:
    """Head and body of a frame; None if its checksum is wrong."""
    file.seek(place.offset)
    return _checked(memoryview(file.read(place.end - place.offset)), place)


def read_mapped_frame(mapped: mmap, place: FramePlace) -> tuple[bytes, memoryview] | None:
    """The same from a file that is mapped: the body is not copied, and must be let go before the map is closed."""
    return _checked(memoryview(mapped)[place.offset : place.end], place)


def _checked(raw: memoryview, place: FramePlace) -> tuple[bytes, memoryview] | None:
    start, head = bytes(raw[:_CHECKED]), bytes(raw[FRAME_BYTES : FRAME_BYTES + place.head_size])
    body = raw[FRAME_BYTES + place.head_size :]
    return (head, body) if _checksum(start, head, body) == place.checksum else None


def places(file: BinaryIO, path: str, damages: list[Damage], start: int = PRELUDE_BYTES) -> Iterator[FramePlace]:
    """All frames from `start` on. What lies between them is added to `damages` and stepped over."""
    size = os.fstat(file.fileno()).st_size
    offset = start
    while offset < size:
        place = place_at(file, offset, size)
        if place is not None:
            yield place
            offset = place.end
            continue
        following = _next_marker(file, offset + 1, size)
        reason = "torn tail" if following == size else "damaged bytes between two frames"
        damages.append(Damage(path=path, offset=offset, size_bytes=following - offset, reason=reason))
        offset = following


def _next_marker(file: BinaryIO, offset: int, size: int) -> int:
    """Where the next whole, sound frame begins; `size` if none does."""
    while offset < size:
        file.seek(offset)
        chunk = file.read(_SEARCH_BYTES)
        found = chunk.find(MARKER)
        if found < 0:
            offset += max(1, len(chunk) - len(MARKER) + 1)
            continue
        place = place_at(file, offset + found, size)
        if place is not None and read_frame(file, place) is not None:
            return offset + found
        offset += found + 1
    return size
