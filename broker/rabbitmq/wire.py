"""A message of the log as RabbitMQ carries it. Pure."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Final

import msgspec
import xxhash
from aiormq.abc import DeliveredMessage
from pamqp.commands import Basic

from broker.api import Record
from broker.errors import TooLargeError
from broker.rabbitmq.index import Kind
from schemas.errors import InvalidIdError

MAX_MESSAGE_BYTES: Final = 8 * 1024 * 1024
"""As on the other brokers: what is larger is a payload."""
PERSISTENT: Final = 2
_KINDS: Final = frozenset(kind.value for kind in Kind)


class Written(msgspec.Struct, frozen=True, kw_only=True):
    """A message as the stream has it."""

    offset: int
    kind: Kind
    subject: str
    data: bytes
    message_id: str
    unix_time_s: float
    headers: dict[str, str]

    @property
    def digest(self) -> int:
        """64-bit xxh3 of the data."""
        return digest_of(self.data)

    def record(self, sequence: int) -> Record:
        """As the log has it."""
        return Record(
            subject=self.subject,
            sequence=sequence,
            data=self.data,
            unix_time_s=self.unix_time_s,
            headers=self.headers,
        )


def digest_of(data: bytes) -> int:
    """64-bit xxh3."""
    return xxhash.xxh3_64_intdigest(data)


def properties(kind: Kind, subject: str, message_id: str, headers: Mapping[str, str] | None = None) -> Basic.Properties:
    """How a message of the stream is labelled."""
    table: dict[str, Any] = {
        "k": kind.value,
        "s": subject,
        "t": time.time_ns() // 1000,
    }  # Any: an AMQP table holds what it holds; floats would be 32 bits
    if headers:
        table["h"] = msgspec.json.encode(headers).decode()
    return Basic.Properties(message_id=message_id, delivery_mode=PERSISTENT, headers=table)


def read_written(message: DeliveredMessage) -> Written | None:
    """A message of the stream; None for what somebody else put there."""
    found = message.header.properties
    table: dict[str, Any] = found.headers or {}  # Any: same
    offset, kind, subject = table.get("x-stream-offset"), table.get("k"), table.get("s")
    if not isinstance(offset, int) or not isinstance(subject, str) or kind not in _KINDS:
        return None
    unix_time_us, headers = table.get("t"), table.get("h")
    return Written(
        offset=offset,
        kind=Kind(kind),
        subject=subject,
        data=bytes(message.body),
        message_id=str(found.message_id or ""),
        unix_time_s=unix_time_us / 1e6 if isinstance(unix_time_us, int) else 0.0,
        headers=msgspec.json.decode(headers, type=dict[str, str]) if isinstance(headers, str) else {},
    )


def offset_of(message: DeliveredMessage) -> int:
    """Where a message of a stream lies."""
    table: dict[str, Any] = message.header.properties.headers or {}  # Any: same
    return int(table["x-stream-offset"])


def check_headers(headers: Mapping[str, str]) -> None:
    """Refuse what another broker could not carry.

    Raises:
        InvalidIdError: a name or value that is not one line.
    """
    for name, value in headers.items():
        if not name or any(mark in name + value for mark in "\r\n") or value != value.strip():
            raise InvalidIdError(f"header {name!r}: expected one line without outer spaces, found {value!r}")


def check_size(subject: str, data: bytes, headers: Mapping[str, str]) -> None:
    """Refuse what is no control message.

    Raises:
        TooLargeError: over MAX_MESSAGE_BYTES.
    """
    size = len(data) + sum(len(name) + len(value) + 4 for name, value in headers.items())
    if size > MAX_MESSAGE_BYTES:
        raise TooLargeError(
            f"{subject!r}: expected at most {MAX_MESSAGE_BYTES} bytes with headers, found {size}: "
            "store the large part as a payload"
        )
