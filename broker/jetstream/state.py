"""Last values with compare-and-set: one subject a key, of which the stream keeps the latest message."""

from __future__ import annotations

import time
from collections.abc import Mapping

from broker.errors import ConflictError
from broker.jetstream.api import call
from broker.jetstream.link import Link
from broker.jetstream.publish import MessageIds, check_size, get_last, send
from broker.naming import RunNames, check_literal
from broker.shapes import Purged, StreamInfo


class State:
    """A run's last values."""

    def __init__(self, link: Link, names: RunNames) -> None:
        self._link = link
        self._names = names
        self._ids = MessageIds()

    async def load(self, key: str) -> tuple[bytes, int] | None:
        """A value and its revision."""
        check_literal(key)
        stored = await get_last(self._link, self._names.state_stream, self._names.state_prefix + key)
        return None if stored is None else (stored.record.data, stored.record.sequence)

    async def list(self, prefix: str) -> Mapping[str, tuple[bytes, int]]:
        """The values of all keys that begin with `prefix` and a dot."""
        check_literal(prefix)
        pattern = f"{self._names.state_prefix}{prefix}.>"
        stream = self._names.state_stream
        info = await call(self._link, f"STREAM.INFO.{stream}", {"subjects_filter": pattern}, StreamInfo)
        found: dict[str, tuple[bytes, int]] = {}
        for subject in sorted(info.state.subjects or {}):
            key = subject.removeprefix(self._names.state_prefix)
            value = await self.load(key)
            if value is not None:
                found[key] = value
        return found

    async def delete(self, key: str) -> None:
        """Forget a value."""
        check_literal(key)
        body = {"filter": self._names.state_prefix + key}
        await call(self._link, f"STREAM.PURGE.{self._names.state_stream}", body, Purged)

    async def save(self, key: str, data: bytes, expected_revision: int | None) -> int:
        """Set a value; its new revision.

        Raises:
            ConflictError: another revision stands there.
        """
        check_literal(key)
        subject = self._names.state_prefix + key
        message_id = self._ids.next()
        head = b"Nats-Msg-Id: %b\r\n" % message_id
        if expected_revision is not None:
            head += b"Nats-Expected-Last-Subject-Sequence: %d\r\n" % expected_revision
        check_size(self._link, subject, data, head)
        until_s = time.monotonic() + self._link.settings.publish_deadline_s
        ack, tried = await send(self._link, subject, data, head, until_s)
        if ack.error is None:
            return ack.seq
        stored = await get_last(self._link, self._names.state_stream, subject)
        if tried and stored is not None and stored.message_id == message_id.decode():
            return stored.record.sequence  # an earlier try of this very call had arrived
        found = 0 if stored is None else stored.record.sequence
        raise ConflictError(f"state {key!r}: expected revision {expected_revision}, found {found}")
