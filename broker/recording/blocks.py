"""Blocks: some hundred messages, or some payloads, compressed together, with a head that says what is inside.

A head is all that an index needs, so an index lost in a crash is built again without decompressing anything.
"""

from __future__ import annotations

import bisect
import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter, methodcaller
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash
import zstandard

from broker.api import Record, RecordBatch
from broker.batches import part

BLOCK_BYTES: Final = 256 * 1024
"""Messages of about this size are compressed together."""
PAYLOAD_BLOCK_BYTES: Final = 1024 * 1024
_MESSAGE_LEVEL: Final = -1  # keeps up with the broker beside it on two busy cores
_PAYLOAD_LEVEL: Final = 3

_KEY_AT: Final = 4
"""Tokens before the key: hr, run, and the topic's two."""
_STEP_TOPICS: Final = frozenset({("step", "assembled"), ("step", "trained"), ("weights", "published")})


class StepMark(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A message that belongs to a step: its place is how a reader finds the step."""

    topic: str
    step: int
    sequence: int


class TopicCount(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """How much of a topic there is."""

    messages: int
    size_bytes: int


class MessageHead(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What a block of messages holds."""

    count: int
    first_sequence: int
    last_sequence: int
    first_time_s: float
    last_time_s: float
    raw_bytes: int
    topics: dict[str, TopicCount]
    marks: list[StepMark] = []
    missing: list[str] = []
    """Payloads that its messages name and that were gone when they were to be recorded."""


class WrittenMessageHead(MessageHead, frozen=True, kw_only=True, gc=False):
    """A head as it stands in the file, with what is only looked at when a key is looked for."""

    entities: bytes
    """Sorted uint64 hashes of the first key token of each message and of the group in it."""


class PayloadHead(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What a block of payloads holds."""

    ids: bytes
    """16 bytes each."""
    sizes: bytes
    """int64 each, in the order of the body."""


class _Columns(msgspec.Struct, frozen=True, kw_only=True):
    """The body of a block of messages."""

    sequences: bytes
    times: bytes
    sizes: bytes
    subjects: list[str]
    data: bytes
    headers: dict[int, dict[str, str]] = {}
    """Only those messages that have any, by their number in the block."""


class _Fields(msgspec.Struct, frozen=True, kw_only=True):
    sequences: memoryview
    times: memoryview
    sizes: memoryview
    subjects: list[str]
    data: memoryview
    headers: dict[int, dict[str, str]] = {}


_encoder: Final = msgspec.msgpack.Encoder()
_head_decoder: Final = msgspec.msgpack.Decoder(MessageHead)
_payload_head_decoder: Final = msgspec.msgpack.Decoder(PayloadHead)
_fields_decoder: Final = msgspec.msgpack.Decoder(_Fields)


def entity_hash(token: str) -> int:
    """How a first key token, or a group, is looked up."""
    return xxhash.xxh3_64_intdigest(token.encode())


def topic_and_entity(subject: str) -> tuple[str, str]:
    """The topic of a control subject and the first token of its key; for a foreign subject what stands there."""
    tokens = subject.split(".", 5)
    if len(tokens) < 5:
        return ".".join(tokens[2:]), ""
    return f"{tokens[2]}.{tokens[3]}", tokens[4]


_tokens: Final = methodcaller("split", ".", 5)
_topic_of: Final[Callable[[list[str]], tuple[str, str]]] = itemgetter(2, 3)
_entity_of: Final[Callable[[list[str]], str]] = itemgetter(_KEY_AT)


class PackedBlock(msgspec.Struct, frozen=True, kw_only=True):
    """A block of messages that is still to be compressed and written."""

    head: bytes
    raw: bytes
    count: int
    last_sequence: int


def message_compressor() -> zstandard.ZstdCompressor:
    """Makes the bodies of blocks, for one thread. It works without the interpreter's lock: other threads go on."""
    return zstandard.ZstdCompressor(level=_MESSAGE_LEVEL)


def pack_messages(batch: RecordBatch, missing: Sequence[str] = ()) -> list[PackedBlock]:
    """Blocks of messages, in order."""
    blocks: list[PackedBlock] = []
    ends = list(itertools.accumulate(map(len, batch.datas)))
    start = 0
    while start < len(batch):
        before = ends[start - 1] if start else 0
        end = max(start + 1, bisect.bisect_left(ends, before + BLOCK_BYTES))
        blocks.append(_packed(part(batch, start, end), () if blocks else missing))
        start = end
    return blocks


def _packed(batch: RecordBatch, missing: Sequence[str]) -> PackedBlock:
    # This function decides how fast a run can be recorded: what is done once a message is left to C.
    split = list(map(_tokens, batch.subjects))
    if min(map(len, split)) <= _KEY_AT:
        split = [tokens if len(tokens) > _KEY_AT else [*tokens, "", "", "", ""] for tokens in split]
    topics = list(map(_topic_of, split))
    counts = Counter(topics)
    lengths = list(map(len, batch.datas))
    sizes = Counter[tuple[str, str]]()
    if len(counts) == 1:
        sizes[topics[0]] = sum(lengths)
    else:
        for topic, length in zip(topics, lengths, strict=True):
            sizes[topic] += length
    columns = _Columns(
        sequences=batch.sequences.tobytes(),
        times=batch.unix_times_s.tobytes(),
        sizes=np.array(lengths, dtype=np.int64).tobytes(),
        subjects=batch.subjects,
        data=b"".join(batch.datas),
        headers={number: dict(headers) for number, headers in batch.headers.items()},
    )
    head = WrittenMessageHead(
        count=len(batch),
        first_sequence=int(batch.sequences[0]),
        last_sequence=int(batch.sequences[-1]),
        first_time_s=float(batch.unix_times_s[0]),
        last_time_s=float(batch.unix_times_s[-1]),
        raw_bytes=len(columns.data),
        topics={".".join(topic).rstrip("."): TopicCount(count, sizes[topic]) for topic, count in counts.items()},
        entities=_hashes(set(map(_entity_of, split))),
        marks=_marks(batch, split, topics) if _STEP_TOPICS & counts.keys() else [],
        missing=list(missing),
    )
    return PackedBlock(
        head=_encoder.encode(head),
        raw=_encoder.encode(columns),
        count=len(batch),
        last_sequence=head.last_sequence,
    )


def _hashes(entities: set[str]) -> bytes:
    entities.update([entity.partition("-")[0] for entity in entities])
    return np.sort(np.array([entity_hash(entity) for entity in entities], dtype=np.uint64)).tobytes()


def _marks(batch: RecordBatch, split: Sequence[list[str]], topics: Sequence[tuple[str, str]]) -> list[StepMark]:
    return [
        StepMark(".".join(topic), int(tokens[_KEY_AT]), int(sequence))
        for topic, tokens, sequence in zip(topics, split, batch.sequences, strict=True)
        if topic in _STEP_TOPICS and tokens[_KEY_AT].isdigit()
    ]


def decode_message_head(raw: bytes) -> MessageHead:
    """The head of a block of messages."""
    return _head_decoder.decode(raw)


class MessageBlock:
    """A decompressed block; records are made when they are asked for."""

    def __init__(self, body: memoryview) -> None:
        fields = _fields_decoder.decode(zstandard.ZstdDecompressor().decompress(body))
        self.subjects: Final = fields.subjects
        self.sequences: Final[npt.NDArray[np.int64]] = np.frombuffer(fields.sequences, dtype=np.int64)
        self.times: Final[npt.NDArray[np.float64]] = np.frombuffer(fields.times, dtype=np.float64)
        self._ends: Final[list[int]] = np.cumsum(np.frombuffer(fields.sizes, dtype=np.int64)).tolist()
        self._data: Final = fields.data
        self._headers: Final[Mapping[int, dict[str, str]]] = fields.headers

    def __len__(self) -> int:
        return len(self.subjects)

    def record(self, number: int) -> Record:
        """The message at `number` of the block."""
        start = self._ends[number - 1] if number else 0
        return Record(
            subject=self.subjects[number],
            sequence=int(self.sequences[number]),
            data=bytes(self._data[start : self._ends[number]]),
            unix_time_s=float(self.times[number]),
            headers=self._headers.get(number, {}),
        )


def encode_payloads(payloads: Sequence[tuple[str, bytes | memoryview]]) -> tuple[bytes, bytes]:
    """Head and body of a block of (id, bytes)."""
    head = PayloadHead(
        ids=b"".join(bytes.fromhex(payload_id) for payload_id, _ in payloads),
        sizes=np.array([len(data) for _, data in payloads], dtype=np.int64).tobytes(),
    )
    raw = payloads[0][1] if len(payloads) == 1 else b"".join(data for _, data in payloads)
    return _encoder.encode(head), zstandard.ZstdCompressor(level=_PAYLOAD_LEVEL).compress(raw)


def decode_payload_head(raw: bytes) -> PayloadHead:
    """The head of a block of payloads."""
    return _payload_head_decoder.decode(raw)


def decode_payloads(head: PayloadHead, body: memoryview) -> dict[str, memoryview]:
    """All payloads of a block, by id."""
    raw = memoryview(zstandard.ZstdDecompressor().decompress(body))
    found: dict[str, memoryview] = {}
    start = 0
    for number, size in enumerate(np.frombuffer(head.sizes, dtype=np.int64).tolist()):
        found[head.ids[16 * number : 16 * number + 16].hex()] = raw[start : start + size]
        start += size
    return found
