"""Typed subjects: a topic and the one message type that is allowed on it.

`hr.<run>.<topic>.<key>`: the topic is two tokens, the key one or more, made of the message's own domain ids. The
subject is the identity of the message: it is created once, and every reader takes the first message of a key.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Final, Generic, TypeVar

import msgspec
import msgspec.inspect

from schemas.errors import DecodeError, InvalidIdError, NonFiniteError
from schemas.ids import decode_token, encode_token

PREFIX: Final = "hr"
M = TypeVar("M", bound=msgspec.Struct)

_encoder: Final = msgspec.msgpack.Encoder()


class Topic(Generic[M]):
    """A kind of message: its name, its type, and how its key is read off a message."""

    __slots__ = ("_decoder", "_float_fields", "_key", "key_fields", "message", "name")

    def __init__(self, name: str, message: type[M], key: Callable[[M], tuple[str | int, ...]], key_fields: str) -> None:
        if name.count(".") != 1:
            raise InvalidIdError(f"a topic is two tokens, like 'group.issued': found {name!r}")
        self.name: Final = name
        self.message: Final = message
        self.key_fields: Final = key_fields
        self._key = key
        self._decoder: msgspec.msgpack.Decoder[M] = msgspec.msgpack.Decoder(message)
        self._float_fields: Final = _fields_with_floats(message)

    def __repr__(self) -> str:
        return f"Topic({self.name!r}, {self.message.__name__})"

    def key(self, message: M) -> str:
        """The key tokens of a message, joined by dots and safe inside a subject."""
        return ".".join(str(part) if isinstance(part, int) else encode_token(part) for part in self._key(message))

    def subject(self, run: str, message: M) -> str:
        """The one subject on which this message stands in a run's log."""
        return f"{PREFIX}.{run}.{self.name}.{self.key(message)}"

    def subject_of(self, run: str, *key: str | int) -> str:
        """The subject of a key given by its parts."""
        tokens = ".".join(str(part) if isinstance(part, int) else encode_token(part) for part in key)
        return f"{PREFIX}.{run}.{self.name}.{tokens}"

    def filter(self, run: str) -> str:
        """The pattern that matches every message of this topic in a run."""
        return f"{PREFIX}.{run}.{self.name}.>"

    def encode(self, message: M) -> bytes:
        """The wire bytes of a message.

        Raises:
            NonFiniteError: a float that is NaN or infinite (a later reader could not carry it into JSON).
        """
        for name in self._float_fields:
            refuse_non_finite(getattr(message, name), f"{type(message).__name__}.{name}")
        return _encoder.encode(message)

    def decode(self, data: bytes | memoryview) -> M:
        """The message in these bytes. Unknown fields (a newer writer's) are ignored.

        Raises:
            DecodeError: not a message of this topic.
        """
        try:
            return self._decoder.decode(data)
        except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError, RecursionError) as error:
            raise DecodeError(
                f"expected a {self.message.__name__} on '{self.name}', found {len(data)} bytes: {error}"
            ) from error

    def decode_at(self, run: str, subject: str | None, data: bytes | memoryview) -> M:
        """As `decode`, for a message that stands on a run's log: it must be the message of its subject, in finite numbers.

        Args:
            run: the log's.
            subject: where it stands; None: it may be any key's (a person put a mended message there).
            data: its bytes.

        Raises:
            DecodeError: not a message of this topic, another key's, or with a float that is NaN or infinite.
        """
        message = self.decode(data)
        try:
            for name in self._float_fields:
                refuse_non_finite(getattr(message, name), f"{self.message.__name__}.{name}")
            expected = self.subject(run, message)
        except (NonFiniteError, InvalidIdError) as error:
            raise DecodeError(f"'{subject or self.name}' holds no message that may stand there: {error}") from error
        if subject is not None and expected != subject:
            raise DecodeError(f"expected the message of '{subject}' there, found that of '{expected[:200]}'")
        return message


def refuse_non_finite(value: object, path: str) -> None:
    """Raise NonFiniteError if a float inside `value` (structs, lists, dicts) is NaN or infinite."""
    if isinstance(value, float):
        if value != value or value in (float("inf"), float("-inf")):  # noqa: PLR0124 - the test for NaN
            raise NonFiniteError(f"{path}: expected a finite number or None, found {value}")
    elif isinstance(value, msgspec.Struct):
        for name in _fields_with_floats(type(value)):
            refuse_non_finite(getattr(value, name), f"{path}.{name}")
    elif isinstance(value, (list, tuple)):
        items: list[object] | tuple[object, ...] = value
        for index, item in enumerate(items):
            refuse_non_finite(item, f"{path}[{index}]")
    elif isinstance(value, dict):
        entries: dict[object, object] = value
        for key, item in entries.items():
            refuse_non_finite(item, f"{path}[{key!r}]")


def _holds_floats(kind: msgspec.inspect.Type, seen: frozenset[type]) -> bool:
    match kind:
        case msgspec.inspect.FloatType() | msgspec.inspect.AnyType() | msgspec.inspect.CustomType():
            return True
        case msgspec.inspect.UnionType(types=members):
            return any(_holds_floats(member, seen) for member in members)
        case msgspec.inspect.ListType(item_type=item) | msgspec.inspect.VarTupleType(item_type=item):
            return _holds_floats(item, seen)
        case msgspec.inspect.TupleType(item_types=items):
            return any(_holds_floats(item, seen) for item in items)
        case msgspec.inspect.DictType(key_type=key, value_type=value):
            return _holds_floats(key, seen) or _holds_floats(value, seen)
        case msgspec.inspect.StructType(cls=cls, fields=fields):
            return cls in seen or any(_holds_floats(field.type, seen | {cls}) for field in fields)
        case _:
            return False


@functools.cache
def _fields_with_floats(message: type[msgspec.Struct]) -> tuple[str, ...]:
    """The fields in which a float could hide, so that the others cost nothing to check."""
    info = msgspec.inspect.type_info(message)
    if not isinstance(info, msgspec.inspect.StructType):
        raise TypeError(f"expected a msgspec.Struct, found {message!r}")
    return tuple(field.name for field in info.fields if _holds_floats(field.type, frozenset({message})))


class SubjectParts(msgspec.Struct, frozen=True, kw_only=True):
    """A control subject taken apart."""

    run: str
    topic: str
    key: tuple[str, ...]
    """The key's ids, decoded."""


def split_subject(subject: str) -> SubjectParts:
    """Run, topic and key of a control subject.

    Raises:
        InvalidIdError: not of the form hr.<run>.<topic>.<key>.
    """
    tokens = subject.split(".")
    if len(tokens) < 5 or tokens[0] != PREFIX or not all(tokens):
        raise InvalidIdError(f"expected 'hr.<run>.<noun>.<verb>.<key>', found {subject!r}")
    return SubjectParts(run=tokens[1], topic=f"{tokens[2]}.{tokens[3]}", key=tuple(decode_token(t) for t in tokens[4:]))


def check_filter(pattern: str) -> str:
    """`pattern` itself, if a broker can match something by it.

    Raises:
        InvalidIdError: empty tokens, `*` inside a token, or `>` anywhere but at the end.
    """
    tokens = pattern.split(".")
    for index, token in enumerate(tokens):
        if not token:
            raise InvalidIdError(f"filter {pattern!r}: empty token at position {index}")
        if token == ">" and index != len(tokens) - 1:
            raise InvalidIdError(f"filter {pattern!r}: '>' may only be the last token")
        if token not in ("*", ">") and any(c in token for c in "*> \t\r\n"):
            raise InvalidIdError(f"filter {pattern!r}: '*' and '>' match whole tokens only, found {token!r}")
    return pattern


def matches(pattern: str, subject: str) -> bool:
    """Whether a subject matches a filter with `*` and `>`."""
    want, have = pattern.split("."), subject.split(".")
    for index, token in enumerate(want):
        if token == ">":
            return len(have) > index
        if index >= len(have) or (token not in ("*", have[index])):
            return False
    return len(want) == len(have)
