"""Which payloads a message names, and which payloads those name in turn.

It must not know where payloads lie.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Final

import msgspec
import msgspec.inspect

from schemas.messages.rollout import InteractionTokens, RowTokens
from schemas.messages.sampling import StreamRow
from schemas.messages.training import Manifest, WeightParts, WeightsManifest
from schemas.payload import RUN_STORE, PayloadRef
from schemas.subjects import Topic
from schemas.topics import TOPICS, topic_named

_FIRST_VERSION: Final = 0


class NamedPayload(msgspec.Struct, frozen=True, kw_only=True):
    """A payload and what it is."""

    ref: PayloadRef
    path: str
    """Where it is named: `interaction.recorded.tokens`."""


PAYLOAD_TYPES: Final[Mapping[str, object]] = {
    "interaction.recorded.tokens": InteractionTokens,
    "trajectory.ready.rows.tokens": RowTokens,
    "step.assembled.manifest": Manifest,
    "stream.listed.rows": list[StreamRow],
    "weights.published.manifest": WeightsManifest,
    "weights.published.parts": WeightParts,
}
"""The msgpack type of the payloads that are not the user's own bytes."""


def _holds_refs(kind: msgspec.inspect.Type) -> bool:
    match kind:
        case msgspec.inspect.StructType(cls=cls, fields=fields):
            return cls is PayloadRef or any(_holds_refs(field.type) for field in fields)
        case msgspec.inspect.UnionType(types=members):
            return any(_holds_refs(member) for member in members)
        case msgspec.inspect.ListType(item_type=item):
            return _holds_refs(item)
        case _:
            return False


def _fields_with_refs(message: type[msgspec.Struct]) -> tuple[str, ...]:
    info = msgspec.inspect.type_info(message)
    if not isinstance(info, msgspec.inspect.StructType):
        raise TypeError(f"expected a msgspec.Struct, found {message!r}")
    return tuple(field.name for field in info.fields if _holds_refs(field.type))


_FIELDS: Final = {topic.name: _fields_with_refs(topic.message) for topic in TOPICS}
TOPICS_WITH_PAYLOADS: Final = frozenset(name for name, fields in _FIELDS.items() if fields)


_STORE: Final = re.compile(re.escape(RUN_STORE.encode()))  # on kilobytes of tokens faster than `in`


def may_name_payloads(data: bytes) -> bool:
    """Whether it is worth decoding a message, or one of several joined, to look for stored payloads: cheap, never wrong
    with False.
    """
    return _STORE.search(data) is not None and b"store" in data


def named_in(topic: Topic[msgspec.Struct], message: msgspec.Struct) -> Iterator[NamedPayload]:
    """The stored payloads that a message names itself."""
    for name in _FIELDS[topic.name]:
        yield from _walk(getattr(message, name), f"{topic.name}.{name}")


def _walk(value: object, path: str) -> Iterator[NamedPayload]:
    if isinstance(value, PayloadRef):
        if value.store == RUN_STORE:
            yield NamedPayload(ref=value, path=path)
    elif isinstance(value, msgspec.Struct):
        for name in value.__struct_fields__:
            yield from _walk(getattr(value, name), f"{path}.{name}")
    elif isinstance(value, list):
        items: list[object] = value
        for item in items:
            yield from _walk(item, path)


def named_in_payload(path: str, data: memoryview) -> list[NamedPayload]:
    """The payloads that a payload names: the rows of a manifest, the prompts of a list.

    Raises:
        msgspec.MsgspecError: not the payload that belongs there.
    """
    if path == "step.assembled.manifest":
        manifest = msgspec.msgpack.decode(data, type=Manifest)
        sizes: list[int] = manifest.payload_sizes.as_numpy().tolist()
        return [
            NamedPayload(
                ref=PayloadRef(store=manifest.payload_store, id=payload_id, size_bytes=size), path=f"{path}.rows"
            )
            for payload_id, size in zip(manifest.payload_ids, sizes, strict=True)
            if manifest.payload_store == RUN_STORE
        ]
    if path == "stream.listed.rows":
        rows = msgspec.msgpack.decode(data, type=list[StreamRow])
        return [
            NamedPayload(ref=row.payload, path=f"{path}.payload")
            for row in rows
            if row.payload is not None and row.payload.store == RUN_STORE
        ]
    if path == "weights.published.parts":
        return [
            NamedPayload(
                ref=PayloadRef(store=RUN_STORE, id=part.id, size_bytes=part.size_bytes), path=f"{path}.files.parts"
            )
            for file in msgspec.msgpack.decode(data, type=WeightParts).files
            for part in file.parts
        ]
    return []


_WEIGHT_FILES: Final = ("weights.published.file", "weights.published.parts")


def is_wanted(named: NamedPayload, message: msgspec.Struct, weights: str) -> bool:
    """Whether a payload belongs into a recording that keeps `weights` (none, first, all): weight files are large."""
    if named.path not in _WEIGHT_FILES or weights == "all":
        return True
    return weights == "first" and getattr(message, "version", None) == _FIRST_VERSION


def decoded_topic(subject: str) -> Topic[msgspec.Struct] | None:
    """The topic of a control subject, if this version knows it."""
    tokens = subject.split(".", 4)
    return topic_named(f"{tokens[2]}.{tokens[3]}") if len(tokens) == 5 else None
