"""The index of one file of a recording: which block holds what, by sequence, time, key and step.

It stands at the end of a closed file. After a crash it is built again from the heads of the blocks, or of the blocks
after the last index.
"""

from __future__ import annotations

import bisect
import os
from typing import BinaryIO, Final

import msgspec
import numpy as np
import numpy.typing as npt
import zstandard

from broker.recording.blocks import (
    MessageHead,
    PayloadHead,
    StepMark,
    decode_message_head,
    decode_payload_head,
    entity_hash,
)
from broker.recording.frames import (
    FRAME_BYTES,
    Damage,
    FramePlace,
    Kind,
    encode_frame,
    place_at,
    places,
    read_frame,
    read_head,
)

_END_HEAD_BYTES: Final = 8
END_BYTES: Final = FRAME_BYTES + _END_HEAD_BYTES


class MessageEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A block of messages in the index."""

    place: FramePlace
    head: MessageHead


class PayloadEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A block of payloads in the index."""

    place: FramePlace
    head: PayloadHead


class FileIndex(msgspec.Struct, kw_only=True):
    """All blocks of one file, in the order of the file."""

    messages: list[MessageEntry] = []
    payloads: list[PayloadEntry] = []
    header: FramePlace | None = None

    def add(self, place: FramePlace, head: bytes) -> None:
        """Take a frame up."""
        if place.kind == Kind.MESSAGES:
            self.messages.append(MessageEntry(place=place, head=decode_message_head(head)))
        elif place.kind == Kind.PAYLOADS:
            self.payloads.append(PayloadEntry(place=place, head=decode_payload_head(head)))
        elif place.kind == Kind.HEADER and self.header is None:
            self.header = place


_decoder: Final = msgspec.msgpack.Decoder(FileIndex)


def index_frames(index: FileIndex, offset: int) -> list[bytes | memoryview]:
    """The two frames that close a file, to be written at `offset`."""
    body = zstandard.ZstdCompressor(level=1).compress(msgspec.msgpack.encode(index))
    return [
        *encode_frame(Kind.INDEX, b"", body),
        *encode_frame(Kind.END, offset.to_bytes(_END_HEAD_BYTES, "little"), b""),
    ]


class LoadedIndex(msgspec.Struct, frozen=True, kw_only=True):
    """An index, where the blocks end, and what could not be read."""

    index: FileIndex
    blocks_end: int
    """Where the next block of this file belongs."""
    damages: list[Damage]
    complete: bool
    """The file was closed; False = its index was built again."""


def load_index(file: BinaryIO, path: str) -> LoadedIndex:
    """The index of a file: as it stands at its end, or built again from the blocks."""
    size = os.fstat(file.fileno()).st_size
    closed = _closing_index(file, size)
    if closed is not None:
        return closed
    index = FileIndex()
    damages: list[Damage] = []
    end = 0
    for place in places(file, path, damages):
        if place.kind in (Kind.INDEX, Kind.END):
            continue
        last = place.end + END_BYTES >= size  # only the newest block can be half-written inside whole borders
        if last and read_frame(file, place) is None:
            reason = "torn tail: the last block's checksum is wrong"
            damages.append(Damage(path=path, offset=place.offset, size_bytes=place.end - place.offset, reason=reason))
            continue
        try:
            index.add(place, read_head(file, place))
        except msgspec.MsgspecError as error:
            reason = f"a block's head can't be read: {error}"
            damages.append(Damage(path=path, offset=place.offset, size_bytes=place.end - place.offset, reason=reason))
            continue
        end = place.end
    return LoadedIndex(index=index, blocks_end=end, damages=damages, complete=False)


def _closing_index(file: BinaryIO, size: int) -> LoadedIndex | None:
    place = place_at(file, size - END_BYTES, size) if size > END_BYTES else None
    if place is None or place.kind != Kind.END or read_frame(file, place) is None:
        return None
    offset = int.from_bytes(read_head(file, place), "little")
    at_index = place_at(file, offset, size)
    if at_index is None or at_index.kind != Kind.INDEX:
        return None
    found = read_frame(file, at_index)
    if found is None:
        return None
    try:
        index = _decoder.decode(zstandard.ZstdDecompressor().decompress(found[1]))
    except (zstandard.ZstdError, msgspec.MsgspecError):
        return None
    return LoadedIndex(index=index, blocks_end=offset, damages=[], complete=True)


class Lookup:
    """Finds blocks of a whole recording (all its files) by key, sequence, time and payload id."""

    def __init__(self, messages: list[tuple[int, MessageEntry]], payloads: list[tuple[int, PayloadEntry]]) -> None:
        """Args: (number of the file, block), in the order of the recording."""
        self.messages: Final = messages
        self.payloads: Final = payloads
        self._first: Final = [entry.head.first_sequence for _, entry in messages]
        self._last: Final = [entry.head.last_sequence for _, entry in messages]
        self._first_time: Final = [entry.head.first_time_s for _, entry in messages]
        hashes = [np.frombuffer(entry.head.entities, dtype=np.uint64) for _, entry in messages]
        self._entities: Final[npt.NDArray[np.uint64]] = _joined(hashes)
        self._entity_blocks: Final = np.repeat(np.arange(len(hashes)), [len(part) for part in hashes])
        self._payload_blocks: dict[bytes, int] | None = None

    def with_entity(self, token: str) -> list[int]:
        """Numbers of the message blocks that may hold a message whose first key token is `token` or belongs to the
        group `token`.
        """
        found = self._entity_blocks[self._entities == np.uint64(entity_hash(token))]
        return sorted(set(found.tolist()))

    def after(self, sequence: int) -> int:
        """The first message block that holds something after `sequence`."""
        return bisect.bisect_right(self._last, sequence)

    def from_time(self, unix_time_s: float) -> int:
        """The first message block that may hold something stored at `unix_time_s` or later."""
        return max(0, bisect.bisect_left(self._first_time, unix_time_s) - 1)

    def step_marks(self) -> list[StepMark]:
        """Where the steps stand."""
        return [mark for _, entry in self.messages for mark in entry.head.marks]

    def payload_block(self, payload_id: str) -> int | None:
        """The payload block that holds an id."""
        if self._payload_blocks is None:
            self._payload_blocks = {
                entry.head.ids[start : start + 16]: number
                for number, (_, entry) in enumerate(self.payloads)
                for start in range(0, len(entry.head.ids), 16)
            }
        try:
            return self._payload_blocks.get(bytes.fromhex(payload_id))
        except ValueError:
            return None


def _joined(parts: list[npt.NDArray[np.uint64]]) -> npt.NDArray[np.uint64]:
    return np.concatenate(parts) if parts else np.empty(0, dtype=np.uint64)
