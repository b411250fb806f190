"""Writes the index that closes a file, in memory that does not grow with the file.

    places of the blocks (40 bytes each) ──▶ each block's head, read back from the file ──▶ index frame, end frame

A head is all that an index entry needs and stands in the file already, so a writer keeps the blocks' places only.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from typing import BinaryIO, Final

import msgspec
import xxhash

from broker.recording.frames import FRAME_BYTES, FramePlace, Kind, encode_frame, frame_start, read_head

_COPIED_BYTES: Final = 1 << 20
_END_HEAD_BYTES: Final = 8
END_BYTES: Final = FRAME_BYTES + _END_HEAD_BYTES
"""Size of the frame that ends a closed file; its head is where the index frame begins."""
_LONG_ARRAY: Final = 0xDD


class BlockPlaces:
    """Where the blocks of one file stand, in columns."""

    def __init__(self) -> None:
        self._offsets: Final = array("Q")
        self._kinds: Final = array("B")
        self._head_sizes: Final = array("Q")
        self._body_sizes: Final = array("Q")
        self._checksums: Final = array("Q")

    def add(self, place: FramePlace) -> None:
        """The next block."""
        self._offsets.append(place.offset)
        self._kinds.append(place.kind)
        self._head_sizes.append(place.head_size)
        self._body_sizes.append(place.body_size)
        self._checksums.append(place.checksum)

    def of_kind(self, kind: Kind) -> Iterator[FramePlace]:
        """In the order of the file."""
        for number, found in enumerate(self._kinds):
            if found == kind:
                yield FramePlace(
                    offset=self._offsets[number],
                    kind=found,
                    head_size=self._head_sizes[number],
                    body_size=self._body_sizes[number],
                    checksum=self._checksums[number],
                )

    def count(self, kind: Kind) -> int:
        """How many there are."""
        return self._kinds.count(kind)


def write_index(file: BinaryIO, offset: int, places: BlockPlaces) -> None:
    """Write the two frames that close a file at `offset`. Until the last byte stands, the file counts as not closed."""
    size = 0
    file.seek(offset + FRAME_BYTES)
    written = offset + FRAME_BYTES
    for piece in _gathered(_body(file, places)):
        file.seek(written)
        file.write(piece)
        written += len(piece)
        size += len(piece)
    start = frame_start(Kind.INDEX, 0, size)
    hasher = xxhash.xxh3_64(start)
    file.flush()
    file.seek(offset + FRAME_BYTES)
    for _ in range(0, size, _COPIED_BYTES):
        hasher.update(file.read(min(_COPIED_BYTES, offset + FRAME_BYTES + size - file.tell())))
    file.seek(offset)
    file.write(start + hasher.intdigest().to_bytes(8, "little"))
    file.seek(written)
    file.writelines(encode_frame(Kind.END, offset.to_bytes(_END_HEAD_BYTES, "little"), b""))


def _body(file: BinaryIO, places: BlockPlaces) -> Iterator[bytes]:
    """The msgpack of a FileIndex, piece by piece."""
    encode = msgspec.msgpack.Encoder().encode
    yield b"\x83" + encode("messages")
    yield from _entries(file, places, Kind.MESSAGES)
    yield encode("payloads")
    yield from _entries(file, places, Kind.PAYLOADS)
    yield encode("header") + encode(next(places.of_kind(Kind.HEADER), None))


def _entries(file: BinaryIO, places: BlockPlaces, kind: Kind) -> Iterator[bytes]:
    encode = msgspec.msgpack.Encoder().encode
    before, between = b"\x82" + encode("place"), encode("head")
    yield bytes([_LONG_ARRAY]) + places.count(kind).to_bytes(4, "big")
    for place in places.of_kind(kind):
        yield before + encode(place) + between + read_head(file, place)


def _gathered(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """In chunks that are worth a write."""
    chunk = bytearray()
    for piece in pieces:
        chunk += piece
        if len(chunk) >= _COPIED_BYTES:
            yield bytes(chunk)
            chunk.clear()
    yield bytes(chunk)
