"""Create-once publishing: one message a subject, whoever comes second gets what stands there.

The check is the server's (expected-last-subject-sequence 0). A lost answer is met by sending the same again; the message
id is new for each call, never taken from the subject, so that no duplicate window can swallow a later, rightful
message. It must not know what the bytes mean.
"""

from __future__ import annotations

import itertools
import secrets
import time
from collections.abc import Mapping
from datetime import datetime
from typing import Final

import anyio
import msgspec

from broker.api import Published, Record
from broker.errors import (
    BrokerError,
    NoSuchStreamError,
    NotAllowedError,
    NotConnectedError,
    PublishTimeoutError,
    StoreFullError,
    TooLargeError,
)
from broker.jetstream.api import RETRY_WAIT_S, ApiError, Code, ErrorBody, call
from broker.jetstream.headers import LINE, header, read_headers, status_of, write_headers
from broker.jetstream.link import Link, LinkLostError, NoAnswerError
from broker.jetstream.questions import Again, Answer
from broker.shapes import StreamInfo

_TAKEN: Final = (Code.WRONG_LAST_SEQUENCE, Code.WRONG_LAST_SEQUENCE_IN_PROCESS)
LOOK_S: Final = 0.5
"""How long to look for the reason why no stream took a message before it is sent again."""
MOST_PATIENCE: Final = 2
"""A publish without a confirmation is sent again after `request_timeout_s`, then each time after so many times as long: a
server that is only slow must not be sent ever more, and one that was elected meanwhile must not be waited for in vain."""
STANDS_WAIT_S: Final = 0.05
"""Between two looks for what stands on the leader and not yet on the replica that was asked."""
_FRAME_BYTES: Final = len(LINE) + 4
_CREATE: Final = b"Nats-Expected-Last-Subject-Sequence: 0\r\nNats-Msg-Id: %b\r\n"


class PubAck(msgspec.Struct, frozen=True, gc=False):
    """The server's answer to a publish."""

    seq: int = 0
    duplicate: bool = False
    error: ErrorBody | None = None


class Stored(msgspec.Struct, frozen=True, kw_only=True):
    """A message as direct get returns it."""

    record: Record
    message_id: str


_ack_decoder: Final = msgspec.json.Decoder(PubAck)


class MessageIds:
    """Ids that no other call of any process has."""

    def __init__(self) -> None:
        self._start = secrets.token_hex(8)
        self._count = itertools.count()

    def next(self) -> bytes:
        """A new one."""
        return f"{self._start}-{next(self._count):x}".encode()


class Gate:
    """Bounds what is sent and not yet confirmed, in messages and bytes."""

    def __init__(self, max_messages: int, max_bytes: int) -> None:
        self._max_messages = max_messages
        self._max_bytes = max_bytes
        self.messages = 0
        self.bytes = 0
        self._free = anyio.Event()

    async def enter(self, size: int) -> None:
        """Wait for room."""
        while self.messages and (self.messages >= self._max_messages or self.bytes + size > self._max_bytes):
            if self._free.is_set():
                self._free = anyio.Event()
            await self._free.wait()
        self.messages += 1
        self.bytes += size

    def leave(self, size: int) -> None:
        """Give the room back."""
        self.messages -= 1
        self.bytes -= size
        self._free.set()


def check_size(link: Link, subject: str, data: bytes | memoryview, head: bytes) -> None:
    """Raise TooLargeError for what would make the server close the connection."""
    size, limit = len(data) + len(head) + _FRAME_BYTES, link.client.max_payload
    if size > limit:
        raise TooLargeError(
            f"{subject!r}: expected at most {limit} bytes with headers (the server's max_payload), found {size}: "
            "store the large part as a payload"
        )


async def send(link: Link, subject: str, data: bytes | memoryview, head: bytes, until_s: float) -> tuple[PubAck, bool]:
    """Publish until an answer comes; the answer, and whether an earlier try may have been stored.

    Raises:
        PublishTimeoutError, NotConnectedError, StoreFullError, NoSuchStreamError.
    """
    tried = False
    first_s = link.settings.request_timeout_s
    again = Again(first_s, MOST_PATIENCE * first_s)
    while True:
        left_s = until_s - time.monotonic()
        await link.wait_connected(left_s)
        try:
            answer = await link.ask(subject, data, headers=head, timeout_s=left_s, again=again)
        except (LinkLostError, NoAnswerError):
            tried, reason, pause_s = True, "no confirmation", 0.0
        else:
            tried, pause_s = tried or answer.times_asked > 1, RETRY_WAIT_S
            if status_of(answer.headers) != 503:
                ack = _ack_decoder.decode(answer.data)
                if ack.error is None or ack.error.err_code in _TAKEN:
                    return ack, tried
                reason = _refused(subject, ack.error)
            else:
                reason = await _why_nobody_listens(link, subject)
        if time.monotonic() >= until_s:
            hint = await _why_nothing_is_stored(link, subject) if tried else ""
            raise PublishTimeoutError(
                f"{subject!r}: {reason} within {link.settings.publish_deadline_s} s; publishing it again is safe{hint}"
            )
        await anyio.sleep(pause_s)


def _refused(subject: str, error: ErrorBody) -> str:
    """The reason of a refusal that may pass; others are raised."""
    text = f"{subject!r}: {error.description} ({error.err_code})"
    if error.err_code in (Code.STORE_FAILED, Code.NO_SPACE, Code.INSUFFICIENT_STORAGE):
        raise StoreFullError(f"the stream refuses {text}: purge below the low-water mark or raise its limit")
    if error.err_code in (Code.TOO_MANY_REQUESTS, Code.DUPLICATE_IN_PROCESS) or error.code == 503:
        return error.description
    if error.code == 404:
        raise NoSuchStreamError(text)
    raise PublishTimeoutError(f"the server could not store {text}")


async def _why_nothing_is_stored(link: Link, subject: str) -> str:
    """A server that answers questions and confirms no message has a disk that is full."""
    try:
        await call(link, f"STREAM.INFO.{_stream_of(subject)}", None, StreamInfo, deadline_s=LOOK_S)
    except BrokerError:
        return ""
    return ". The server answers, but stores nothing: its disk may be full (see its log); it needs room and a restart"


def _stream_of(subject: str) -> str:
    prefix, run = subject.split(".", 2)[:2]
    return f"{prefix.upper()}_{run}"


async def _why_nobody_listens(link: Link, subject: str) -> str:
    stream = _stream_of(subject)
    try:
        await call(link, f"STREAM.INFO.{stream}", None, StreamInfo, deadline_s=LOOK_S)
    except NotConnectedError:
        return "no stream listened, and nobody knows why"  # a cluster without a leader, perhaps
    except ApiError as error:
        if error.err_code == Code.STREAM_NOT_FOUND:
            raise NoSuchStreamError(
                f"no stream keeps {subject!r}: expected {stream} on this broker; create the run's streams first"
            ) from error
    return "no stream listened"


async def get_last(link: Link, stream: str, subject: str) -> Stored | None:
    """What stands on a subject."""
    answer = await get_last_answer(link, stream, subject)
    return None if answer is None else stored_from(answer)


async def get_last_answer(link: Link, stream: str, subject: str) -> Answer | None:
    """What stands on a subject, by subject-form direct get, as it came."""
    until_s = time.monotonic() + link.settings.publish_deadline_s
    while True:
        await link.wait_connected(until_s - time.monotonic())
        pause_s = RETRY_WAIT_S
        try:
            answer = await link.ask(f"$JS.API.DIRECT.GET.{stream}.{subject}", timeout_s=link.settings.request_timeout_s)
        except (LinkLostError, NoAnswerError):
            reason = "no answer"
        else:
            status = status_of(answer.headers)
            if status == 0:
                return answer
            if status != 404:
                reason = await _why_nobody_listens(link, subject)
            elif await _leader_has(link, stream, subject):
                reason, pause_s = "the leader has it, and no replica that was asked", STANDS_WAIT_S
            else:
                return None
        if time.monotonic() >= until_s:
            raise PublishTimeoutError(f"{subject!r}: {reason} within {link.settings.publish_deadline_s} s")
        await anyio.sleep(pause_s)


async def _leader_has(link: Link, stream: str, subject: str) -> bool:
    """Whether something stands there though a replica does not have it: replicas confirm by majority, and one may lag."""
    if not link.replicated:
        return False
    try:
        info = await call(link, f"STREAM.INFO.{stream}", {"subjects_filter": subject}, StreamInfo)
    except NotAllowedError:
        return False
    return bool(info.state.subjects)


def stored_from(answer: Answer) -> Stored:
    """A direct-get answer as a record."""
    block = answer.headers
    return Stored(
        record=Record(
            subject=header(block, b"Nats-Subject") or "",
            sequence=int(header(block, b"Nats-Sequence") or 0),
            data=bytes(answer.data),
            unix_time_s=unix_time_s(header(block, b"Nats-Time-Stamp") or ""),
            headers=read_headers(block),
        ),
        message_id=header(block, b"Nats-Msg-Id") or "",
    )


def unix_time_s(text: str) -> float:
    """Seconds of an RFC 3339 time with nanoseconds; 0 for none."""
    if not text:
        return 0.0
    whole, _, fraction = text.removesuffix("Z").partition(".")
    return datetime.fromisoformat(f"{whole}+00:00").timestamp() + float(f"0.{fraction or 0}")


class Publisher:
    """Creates messages on one connection."""

    def __init__(self, link: Link, stream: str) -> None:
        self._link = link
        self._stream = stream
        self._ids = MessageIds()
        settings = link.settings
        self.gate = Gate(settings.max_in_flight, settings.max_in_flight_bytes)

    async def create(self, subject: str, data: bytes, headers: Mapping[str, str] | None) -> Published:
        """Create the message of `subject`, once."""
        extra = write_headers(headers) if headers else b""
        await self.gate.enter(len(data))
        try:
            return await self._create(subject, data, extra)
        finally:
            self.gate.leave(len(data))

    async def _create(self, subject: str, data: bytes, extra: bytes) -> Published:
        until_s = time.monotonic() + self._link.settings.publish_deadline_s
        message_id, tried = self._ids.next(), False
        while True:
            head = _CREATE % message_id + extra
            check_size(self._link, subject, data, head)
            ack, tried_now = await send(self._link, subject, data, head, until_s)
            tried = tried or tried_now
            if ack.error is None and not ack.duplicate:
                return Published(sequence=ack.seq, created=True)
            standing = await get_last(self._link, self._stream, subject)
            if standing is not None:
                same = standing.record.data == data
                return Published(
                    sequence=standing.record.sequence,
                    created=tried and standing.message_id == message_id.decode(),
                    standing=None if same else standing.record.data,
                )
            # Nothing stands there: it was purged since, this replica lags, or a cluster is still agreeing.
            if time.monotonic() >= until_s:
                raise PublishTimeoutError(f"{subject!r}: the server calls it taken, and nothing stands there")
            if ack.duplicate:
                message_id = self._ids.next()  # a duplicate of nothing is not stored, and never would be by this id
            await anyio.sleep(RETRY_WAIT_S)
