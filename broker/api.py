"""The ports of this room: a run's log, its last-value state, its short-lived talk, and its payloads.

What every implementation promises (broker/conformance.py checks it):

* `publish` creates a message once: the first bytes of a subject stand for ever, and whoever comes second gets them back.
  It returns after the message is stored.
* One sequence, from 1, orders all messages of a run. An acknowledgement deletes nothing.
* `consume` shares work: each message goes to one of a durable's consumers, again after `ack_wait_s` without an
  acknowledgement or a sign of life. `read` shares nothing: each reader sees all.
* Nothing is lost when the caller is cancelled, when the server is killed and restarted, or when a reply is lost.

This room knows bytes and subjects. It must not know stages, and only `schemas` of the other rooms.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from enum import StrEnum
from typing import Final, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from schemas.payload import PayloadRef


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """A message as it stands in the log."""

    subject: str
    sequence: int
    data: bytes
    unix_time_s: float
    """When the broker stored it: for people, never for a fold."""
    headers: Mapping[str, str] = {}


class RecordBatch(msgspec.Struct, frozen=True, kw_only=True):
    """Messages as they stand in the log, column by column: for who takes very many of them. All columns are equally long."""

    subjects: list[str]
    sequences: npt.NDArray[np.int64]
    """Ascending."""
    unix_times_s: npt.NDArray[np.float64]
    datas: list[bytes]
    headers: Mapping[int, Mapping[str, str]] = {}
    """Of those messages that have any, by their number in the batch."""

    def __len__(self) -> int:
        return len(self.datas)


class Published(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to a publish."""

    sequence: int
    created: bool
    """False: the subject was taken before."""
    standing: bytes | None = None
    """The bytes that stand there, when `created` is False and they differ from the caller's."""


class ConsumerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How a durable hands out work. Part of the topology."""

    ack_wait_s: float = 10.0
    max_ack_pending: int = 4096
    prefetch: int = 256
    """Messages that one worker may hold; the number of free slots for long tasks."""
    max_bytes: int = 8 * 1024 * 1024
    """Bytes that one worker may hold undelivered."""


class ConsumerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Where a durable stands."""

    durable: str
    filters: list[str]
    delivered: int
    """Stream sequence of the last message handed out."""
    ack_floor: int
    num_pending: int
    """Messages not handed out yet."""
    num_ack_pending: int
    """Messages handed out and not acknowledged."""
    num_redelivered: int
    num_waiting: int
    """Parked pulls."""


class LogStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a run's log."""

    first_sequence: int
    last_sequence: int
    num_messages: int
    size_bytes: int
    max_bytes: int
    """Limit, or -1."""
    payload_bytes: int
    payload_max_bytes: int = -1
    """Limit, or -1: none on the broker (a folder has its disk's)."""
    connected_url: str


class Delivery(Protocol):
    """A message that this worker is to deal with."""

    @property
    def subject(self) -> str: ...
    @property
    def sequence(self) -> int: ...
    @property
    def data(self) -> bytes: ...
    @property
    def num_delivered(self) -> int:
        """1 for the first time."""
        ...

    async def ack(self) -> None:
        """Done. Safe to lose: it may be delivered again, so effects are idempotent."""
        ...

    async def retry(self, delay_s: float) -> None:
        """Not done: deliver again after `delay_s`."""
        ...

    async def still_working(self) -> None:
        """Push the redelivery back by another ack_wait."""
        ...


class PayloadStore(Protocol):
    """Content-addressed bytes. `put` before the message that names them."""

    @property
    def name(self) -> str: ...

    async def put(self, data: bytes | memoryview) -> PayloadRef:
        """Store; storing the same bytes twice is harmless. Returns when they are stored."""
        ...

    async def get(self, ref: PayloadRef) -> memoryview:
        """The bytes, checked against the reference.

        Raises:
            PayloadMissingError: no such payload.
            DigestError: the store returned other bytes.
        """
        ...

    async def delete(self, payload_id: str) -> None:
        """Forget; unknown ids are fine."""
        ...


class StoredPayload(msgspec.Struct, frozen=True, kw_only=True):
    """A payload as its store lists it."""

    id: str
    size_bytes: int
    unix_time_s: float
    """When it was stored, or renewed: storing the same bytes again renews what is older than
    `ConnectSettings.payload_renew_after_s`.
    """
    revision: int = 0
    """What was stored or renewed after it was listed has a higher one."""


class CollectablePayloads(PayloadStore, Protocol):
    """A payload store that can tell what it holds: for whoever collects what no message names any more."""

    def stored(self, *, before_unix_s: float) -> AsyncIterator[StoredPayload]:
        """The payloads that were stored before a time, in no certain order."""
        ...

    async def collect(self, payload: StoredPayload) -> None:
        """Forget a listed payload, unless it was renewed since."""
        ...


class Capability(StrEnum):
    """What not every broker can do; all that the ports say besides these holds everywhere."""

    CREATE_ONCE_ON_SERVER = "create_once_on_server"
    """The server itself refuses a second message on a subject, also from foreign clients. Elsewhere every reader takes the
    first and drops the rest.
    """
    ACK_WAIT_ON_SERVER = "ack_wait_on_server"
    """A silent worker's messages go to others after `ack_wait_s`. Elsewhere a living process gives back its own forgotten ones
    by then, and a dead or stopped one's come back when its connection is given up.
    """
    PENDING_BOUND = "pending_bound"
    """`max_ack_pending` bounds what all workers hold together. Elsewhere each worker's `prefetch` is the only bound."""
    CONSUMER_POSITIONS = "consumer_positions"
    """`consumers` tells what is handed out, acknowledged and delivered again."""
    PURGE_FREES_SPACE = "purge_frees_space"
    """What `purge_below` drops leaves the server's disk at once."""


ALL_CAPABILITIES: Final = frozenset(Capability)


class Broker(Protocol):
    """One run's log on one connection."""

    @property
    def run(self) -> str: ...
    @property
    def capabilities(self) -> frozenset[Capability]:
        """The broker's level."""
        ...

    @property
    def payloads(self) -> PayloadStore: ...

    async def publish(self, subject: str, data: bytes, *, headers: Mapping[str, str] | None = None) -> Published:
        """Create the message of `subject`, once. Returns when it is stored.

        Raises:
            TooLargeError, StoreFullError, PublishTimeoutError, NotConnectedError, NoSuchStreamError.
        """
        ...

    async def get(self, subject: str) -> Record | None:
        """The message that stands on a subject."""
        ...

    def read(
        self, filters: Sequence[str], *, after_sequence: int = 0, follow: bool = True, headers_only: bool = False
    ) -> AbstractAsyncContextManager[AsyncIterator[Record]]:
        """All messages of `filters` after `after_sequence`, in order, without gaps; then new ones as they come, or, with
        `follow=False`, the end at the last message that stood when the reader was opened.
        """
        ...

    def read_batches(
        self, filters: Sequence[str], *, after_sequence: int = 0, follow: bool = True
    ) -> AbstractAsyncContextManager[AsyncIterator[RecordBatch]]:
        """As `read`, but as many at once as there are: one at least, some thousand at the most."""
        ...

    def consume(
        self, durable: str, filters: Sequence[str], settings: ConsumerSettings
    ) -> AbstractAsyncContextManager[AsyncIterator[Delivery]]:
        """This worker's share of a durable's messages. What is held on exit goes to others after ack_wait."""
        ...

    async def load_state(self, key: str) -> tuple[bytes, int] | None:
        """A last value and its revision."""
        ...

    async def save_state(self, key: str, data: bytes, *, expected_revision: int | None = None) -> int:
        """Set a last value; its new revision. `expected_revision` 0 = must not exist; None = whatever stands.

        Raises:
            ConflictError: another revision stands there.
        """
        ...

    async def list_state(self, prefix: str) -> Mapping[str, tuple[bytes, int]]:
        """The last values whose keys begin with `prefix` and a dot, with their revisions."""
        ...

    async def delete_state(self, key: str) -> None:
        """Forget a last value; an unknown key is fine."""
        ...

    async def announce(self, subject: str, data: bytes) -> None:
        """Tell whoever listens now (heartbeats, metrics). Not on the log."""
        ...

    def listen(self, pattern: str) -> AbstractAsyncContextManager[AsyncIterator[tuple[str, bytes]]]:
        """What is announced from now on; the oldest is dropped when the listener is slow."""
        ...

    async def request(self, subject: str, data: bytes, *, deadline_s: float) -> bytes:
        """Ask one server of `subject`.

        Raises:
            NotConnectedError: nobody answered within the deadline.
        """
        ...

    def serve(self, subject: str, handler: Callable[[bytes], Awaitable[bytes]]) -> AbstractAsyncContextManager[None]:
        """Answer requests while the context is open; several servers of one subject share them."""
        ...

    async def consumers(self) -> list[ConsumerStatus]:
        """All durables of the run."""
        ...

    async def log_status(self) -> LogStatus: ...

    async def purge_below(self, sequence: int, *, pattern: str = "") -> int:
        """Drop the messages below `sequence`, with `pattern` only those whose subject it matches; how many there were."""
        ...


class Mirror(Protocol):
    """Another broker's end, where records are copied to."""

    @property
    def place(self) -> str:
        """Where the copies go, without a login."""
        ...

    async def publish_all(self, records: list[Record]) -> None:
        """Publish in order; returns when all are confirmed: at least once each."""
        ...
