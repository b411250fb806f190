"""The index of one file of a recording: which block holds what, by sequence, time, key and step.

It stands at the end of a closed file. After a crash it is built again from the heads of the blocks, or of the blocks
after the last index.
"""

from __future__ import annotations

import bisect
import os
from collections.abc import Callable, Sequence
from mmap import ACCESS_READ, mmap
from typing import BinaryIO, Final, TypeVar

import msgspec
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
    Damage,
    FramePlace,
    Kind,
    place_at,
    places,
    read_frame,
    read_head,
    read_mapped_frame,
)
from broker.recording.index_file import END_BYTES

_ZSTD: Final = zstandard.FRAME_HEADER
_HASH_BYTES: Final = 8


class MessageEntry(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A block of messages in the index."""

    place: FramePlace
    head: MessageHead


class PayloadEntry(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A block of payloads in the index."""

    place: FramePlace
    head: PayloadHead


class FileIndex(msgspec.Struct, kw_only=True):
    """All blocks of one file, in the order of the file."""

    messages: list[MessageEntry] = []
    payloads: list[PayloadEntry] = []
    header: FramePlace | None = None

    def places(self) -> list[FramePlace]:
        """Where all blocks stand, in the order of the file."""
        found = [entry.place for entry in self.messages] + [entry.place for entry in self.payloads]
        return sorted([*found, *([self.header] if self.header else [])], key=lambda place: place.offset)

    def add(self, place: FramePlace, head: bytes) -> None:
        """Take a frame up."""
        if place.kind == Kind.MESSAGES:
            self.messages.append(MessageEntry(place=place, head=decode_message_head(head)))
        elif place.kind == Kind.PAYLOADS:
            self.payloads.append(PayloadEntry(place=place, head=decode_payload_head(head)))
        elif place.kind == Kind.HEADER and self.header is None:
            self.header = place


class _Entities(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    entities: bytes


class _EntitiesEntry(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    head: _Entities


class _EntitiesIndex(msgspec.Struct, frozen=True, kw_only=True):
    """Of an index, only what `with_entity` needs."""

    messages: list[_EntitiesEntry] = []


_decoder: Final = msgspec.msgpack.Decoder(FileIndex)
_entities_index_decoder: Final = msgspec.msgpack.Decoder(_EntitiesIndex)
_entities_decoder: Final = msgspec.msgpack.Decoder(_Entities)


class LoadedIndex(msgspec.Struct, frozen=True, kw_only=True):
    """An index, where the blocks end, and what could not be read."""

    index: FileIndex
    blocks_end: int
    """Where the next block of this file belongs."""
    damages: list[Damage]
    at_index: FramePlace | None
    """Where it stands in a file that was closed; None = it was built again."""

    @property
    def complete(self) -> bool:
        """The file was closed."""
        return self.at_index is not None


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
    return LoadedIndex(index=index, blocks_end=end, damages=damages, at_index=None)


def _closing_index(file: BinaryIO, size: int) -> LoadedIndex | None:
    place = place_at(file, size - END_BYTES, size) if size > END_BYTES else None
    if place is None or place.kind != Kind.END or read_frame(file, place) is None:
        return None
    offset = int.from_bytes(read_head(file, place), "little")
    at_index = place_at(file, offset, size)
    if at_index is None or at_index.kind != Kind.INDEX:
        return None
    index = _from_body(file, at_index, _decoder)
    return None if index is None else LoadedIndex(index=index, blocks_end=offset, damages=[], at_index=at_index)


T = TypeVar("T")


def _from_body(file: BinaryIO, place: FramePlace, decoder: msgspec.msgpack.Decoder[T]) -> T | None:
    """What an index frame says; the file is mapped, so that what the decoder passes over takes no memory."""
    with mmap(file.fileno(), 0, access=ACCESS_READ) as mapped:
        found = read_mapped_frame(mapped, place)
        if found is None:
            return None
        try:
            with found[1] as body:
                # Former versions compressed it.
                return decoder.decode(
                    zstandard.ZstdDecompressor().decompress(body) if bytes(body[:4]) == _ZSTD else body
                )
        except (zstandard.ZstdError, msgspec.MsgspecError):
            return None


def entities_of(file: BinaryIO, at_index: FramePlace | None, entries: Sequence[MessageEntry]) -> list[bytes]:
    """The entities of each message block of a file, in order; of a file that was not closed from the blocks' heads."""
    if at_index is not None:
        found = _from_body(file, at_index, _entities_index_decoder)
        if found is not None:
            return [entry.head.entities for entry in found.messages]
    return [_entities_decoder.decode(read_head(file, entry.place)).entities for entry in entries]


class Lookup:
    """Finds blocks of a whole recording (all its files) by key, sequence, time and payload id."""

    def __init__(
        self,
        messages: list[tuple[int, MessageEntry]],
        payloads: list[tuple[int, PayloadEntry]],
        entities: Callable[[], list[bytes]],
    ) -> None:
        """Args:
        messages, payloads: (number of the file, block), in the order of the recording.
        entities: reads those of all message blocks.
        """
        self.messages: Final = messages
        self.payloads: Final = payloads
        self._first: Final = [entry.head.first_sequence for _, entry in messages]
        self._last: Final = [entry.head.last_sequence for _, entry in messages]
        self._first_time: Final = [entry.head.first_time_s for _, entry in messages]
        self._read_entities: Final = entities
        self._entities: list[bytes] | None = None
        """Of each message block."""
        self._payload_blocks: dict[bytes, int] | None = None

    def with_entity(self, token: str) -> list[int]:
        """Numbers of the message blocks that may hold a message whose first key token is `token` or belongs to the
        group `token`.
        """
        if self._entities is None:
            self._entities = self._read_entities()
        wanted = entity_hash(token).to_bytes(_HASH_BYTES, "little")
        return [number for number, hashes in enumerate(self._entities) if _holds(hashes, wanted)]

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


def _holds(hashes: bytes, wanted: bytes) -> bool:
    """Whether one of the hashes is the wanted one. They are searched as bytes: that is quicker than to make arrays of them."""
    at = hashes.find(wanted)
    while at > 0 and at % _HASH_BYTES:
        at = hashes.find(wanted, at + 1)
    return at >= 0
