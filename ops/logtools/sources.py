"""One way to read a run's log, whether it stands on a broker or in a recording."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final, Protocol

import msgspec

from broker.api import Broker, Record
from broker.naming import any_matches, overlaps
from broker.recording import Recording
from broker.recording.references import decoded_topic
from ops.connection import look_at_run
from pipeline.retries import is_retry
from schemas.errors import DecodeError
from schemas.payload import PayloadRef
from schemas.subjects import PREFIX, Topic
from schemas.topics import DEAD_RETRY


class LogSource(Protocol):
    """A run's log to be read from its start to its present end."""

    @property
    def run(self) -> str: ...

    @property
    def place(self) -> str:
        """Where it stands, for people."""
        ...

    def read(self, filters: Sequence[str] = ()) -> AsyncIterator[Record]:
        """The messages of some subject patterns, in order; none = all."""
        ...

    async def payload(self, ref: PayloadRef) -> memoryview:
        """The bytes of a reference.

        Raises:
            PayloadMissingError, DigestError.
        """
        ...


class LiveSource:
    """A log on a broker."""

    def __init__(self, broker: Broker, *, is_running: bool = False) -> None:
        """Args:
        broker: the run's.
        is_running: whether workers may speak, too: the run is not known to be over.
        """
        self.broker: Final = broker
        self.is_running: Final = is_running

    @property
    def run(self) -> str:
        return self.broker.run

    @property
    def place(self) -> str:
        return f"the log of run {self.broker.run}"

    async def read(self, filters: Sequence[str] = ()) -> AsyncIterator[Record]:
        wanted = tuple(filters) or (f"{PREFIX}.{self.broker.run}.>",)
        async with self.broker.read(apart(wanted), follow=False) as records:
            async for record in records:
                if any_matches(wanted, record.subject):
                    yield record

    async def payload(self, ref: PayloadRef) -> memoryview:
        return ref.inline if ref.inline is not None else await self.broker.payloads.get(ref)


class FileSource:
    """A recording."""

    def __init__(self, recording: Recording) -> None:
        self.recording: Final = recording

    @property
    def run(self) -> str:
        return self.recording.run

    @property
    def place(self) -> str:
        return str(self.recording.path)

    async def read(self, filters: Sequence[str] = ()) -> AsyncIterator[Record]:
        for record in self.recording.records(filters):
            yield record

    async def payload(self, ref: PayloadRef) -> memoryview:
        return self.recording.payload(ref)


@asynccontextmanager
async def open_source(target: str | None, *, url: str | None = None) -> AsyncGenerator[LogSource]:
    """A recording's file, a run's folder or name, or, with `url`, a run's id; None = the newest run here.

    Raises:
        RunFolderError, NotConnectedError, RecordingError.
    """
    if target is not None and url is None and Path(target).is_file():  # noqa: ASYNC240 - one look at a local name
        with Recording(Path(target)) as recording:
            yield FileSource(recording)
        return
    async with look_at_run(target, url=url) as opened:
        yield LiveSource(opened.broker, is_running=opened.is_running)


def apart(filters: Sequence[str]) -> list[str]:
    """Filters that match at least what these do and have nothing in common, as brokers want them. They may match more:
    whoever reads by them checks the subject against his own.
    """
    kept: list[str] = []
    for pattern in dict.fromkeys(filters):
        wanted = pattern
        while (other := next((found for found in kept if overlaps(wanted, found)), None)) is not None:
            kept.remove(other)
            wanted = _joined(wanted, other)
        kept.append(wanted)
    return kept


def _joined(first: str, second: str) -> str:
    """The narrowest filter that matches whatever one of two overlapping ones does."""
    a, b = first.split("."), second.split(".")
    tokens: list[str] = []
    for x, y in zip(a, b, strict=False):
        if ">" in (x, y):
            return ".".join([*tokens, ">"])
        tokens.append(x if x == y else "*")
    return ".".join(tokens)


class Told(msgspec.Struct, frozen=True, kw_only=True):
    """A message of the log, decoded where this version can."""

    record: Record
    topic: Topic[msgspec.Struct] | None
    """None: a topic that this version does not know."""
    message: msgspec.Struct | None
    error: str = ""
    """Why it can't be decoded."""


def tell(record: Record) -> Told:
    """Decode a record, or say why not."""
    topic = decoded_topic(record.subject)
    if topic is None:
        return Told(record=record, topic=None, message=None, error=f"no topic of this version: {record.subject}")
    try:
        return Told(record=record, topic=topic, message=topic.decode(record.data))
    except DecodeError as error:
        return Told(record=record, topic=topic, message=None, error=str(error))


def retried(record: Record) -> Told:
    """The message that the retry of a dead letter stands for; other records as they are."""
    if not is_retry(record.subject):
        return tell(record)
    retry = DEAD_RETRY.decode(record.data)
    return tell(msgspec.structs.replace(record, subject=retry.subject, data=retry.data))
