"""A broker as workers use it: near its limits room is kept for what ends work, and payloads wait for room.

    share of the log ≥ STARTS_STOP_AT   no new episode begins
                     ≥ BULK_STOP_AT     no interaction is stored: what is left is for ends, steps, marks and control
    share of payloads ≥ BULK_STOP_AT    what is left is for checkpoints and manifests

How full the store is comes from whoever keeps the low-water mark, once a second; where nobody does, the server's own limit is
all there is. Storing a payload is tried again until there is room: work that was done is not thrown away.
"""

from __future__ import annotations

import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Final, TypeVar

import anyio
import msgspec
import structlog

from broker.api import (
    Broker,
    Capability,
    ConsumerSettings,
    ConsumerStatus,
    Delivery,
    LogStatus,
    PayloadStore,
    Published,
    Record,
    RecordBatch,
)
from broker.errors import RetryableBrokerError, StoreFullError
from pipeline.delivery import RetryPolicy, backoff_s
from pipeline.metrics import WorkerReport, report_subject
from pipeline.tracing import HEADER, Tracing, place_of, traceparent, work_began_ns
from schemas.payload import PayloadRef
from schemas.topics import EPISODE_LAUNCHED, EPISODE_REQUESTED, GROUP_ISSUED, INTERACTION_RECORDED, SESSION_OPENED

T = TypeVar("T")
log = structlog.get_logger("headrace.headroom")

KEEPER: Final = "retention"
"""The service whose reports tell how full the store is."""
STORE_LABEL: Final = "store_error"
"""The label under which its reports tell that nothing new is begun, and why."""
LOG_SHARE: Final = "log_share"
PAYLOAD_SHARE: Final = "payload_share"
STARTS_STOP_AT: Final = 0.9
BULK_STOP_AT: Final = 0.95
_STARTS: Final = frozenset(topic.name for topic in (GROUP_ISSUED, EPISODE_REQUESTED, EPISODE_LAUNCHED, SESSION_OPENED))
_BULK: Final = frozenset({*_STARTS, INTERACTION_RECORDED.name})
_STALE_S: Final = 5.0
"""A share that nobody told for so long counts no more."""
_POLICY: Final = RetryPolicy(first_delay_s=0.1, max_delay_s=5.0)


class StoreShares:
    """How full the store is, as it was told last."""

    def __init__(self, *, now: Callable[[], float] = time.monotonic) -> None:
        self.log = 0.0
        self.payloads = 0.0
        self._told_s = 0.0
        self._now: Final = now

    def tell(self, log_share: float, payload_share: float) -> None:
        """Somebody looked."""
        self.log, self.payloads, self._told_s = log_share, payload_share, self._now()

    def check_message(self, subject: str) -> None:
        """Raise StoreFullError for a message that must not take the room that is left."""
        topic = ".".join(subject.split(".", 4)[2:4])
        limit = STARTS_STOP_AT if topic in _STARTS else BULK_STOP_AT
        if topic in _BULK and self.log >= limit and self._is_known():
            raise StoreFullError(
                f"the log is {self.log:.0%} full: {topic} waits, what is left is kept for what ends work"
            )

    def check_payload(self) -> None:
        """Raise StoreFullError if the room that is left for payloads is kept for checkpoints and manifests."""
        if self.payloads >= BULK_STOP_AT and self._is_known():
            raise StoreFullError(
                f"the payload store is {self.payloads:.0%} full: what is left is kept for checkpoints and manifests"
            )

    def _is_known(self) -> bool:
        return self._now() - self._told_s < _STALE_S


class Patience:
    """Tries again for as long as the store is full or the broker away, and says so."""

    def __init__(self) -> None:
        self.blocked: Final[dict[str, float]] = {}
        """What is waited for → since when (Unix time), for reports."""

    async def until_done(self, act: Callable[[], Awaitable[T]], what: str) -> T:
        """The result of `act`.

        Raises:
            BrokerError: one that waiting can't help.
        """
        attempt = 0
        while True:
            try:
                done = await act()
            except StoreFullError as error:
                blocked, reason = "blocked: store full", str(error)
            except RetryableBrokerError as error:
                blocked, reason = "blocked: broker away", str(error)
            else:
                if attempt:
                    self.blocked.clear()
                return done
            attempt += 1
            self.blocked.setdefault(blocked, time.time())
            log.warning(blocked, what=what, attempt=attempt, error=reason)
            await anyio.sleep(backoff_s(attempt, _POLICY, random.random()))  # noqa: S311 - spreads retries


class PatientPayloads:
    """A payload store that waits for room."""

    def __init__(self, store: PayloadStore, patience: Patience, shares: StoreShares | None) -> None:
        """Args:
        store: where payloads go.
        patience: how it waits.
        shares: keep headroom; None: use the last byte.
        """
        self._store: Final = store
        self._patience: Final = patience
        self._shares: Final = shares

    @property
    def name(self) -> str:
        return self._store.name

    async def put(self, data: bytes | memoryview) -> PayloadRef:
        async def store() -> PayloadRef:
            if self._shares is not None:
                self._shares.check_payload()
            return await self._store.put(data)

        return await self._patience.until_done(store, f"a payload of {len(data)} bytes")

    async def get(self, ref: PayloadRef) -> memoryview:
        return await self._store.get(ref)

    async def delete(self, payload_id: str) -> None:
        await self._store.delete(payload_id)


class WorkerBroker:
    """A `Broker` with headroom and patience; all else is the other's."""

    def __init__(self, broker: Broker, tracing: Tracing | None = None) -> None:
        """Args:
        broker: the run's.
        tracing: records a span for each message of an episode that this worker creates; None: nobody asks.
        """
        self.inner: Final = broker
        self._tracing: Final = tracing
        self.shares: Final = StoreShares()
        self.patience: Final = Patience()
        self.bulk_payloads: Final = PatientPayloads(broker.payloads, self.patience, self.shares)
        """For tokens and weights."""
        self._payloads: Final = PatientPayloads(broker.payloads, self.patience, None)

    async def follow_shares(self) -> None:
        """Hear how full the store is, for ever."""
        async with self.inner.listen(report_subject(self.run, KEEPER)) as announcements:
            async for _subject, data in announcements:
                gauges = msgspec.msgpack.decode(data, type=WorkerReport).gauges
                if LOG_SHARE in gauges:
                    self.shares.tell(gauges[LOG_SHARE], gauges.get(PAYLOAD_SHARE, 0.0))

    @property
    def run(self) -> str:
        return self.inner.run

    @property
    def capabilities(self) -> frozenset[Capability]:
        return self.inner.capabilities

    @property
    def payloads(self) -> PayloadStore:
        return self._payloads

    async def publish(self, subject: str, data: bytes, *, headers: Mapping[str, str] | None = None) -> Published:
        self.shares.check_message(subject)
        if self._tracing is None or (place := place_of(subject)) is None:
            return await self.inner.publish(subject, data, headers=headers)
        began_ns = work_began_ns()
        published = await self.inner.publish(subject, data, headers={**(headers or {}), HEADER: traceparent(place)})
        if published.created:  # whoever comes second adopts the message, and its span was recorded by the first
            self._tracing.said(place, began_ns)
        return published

    async def publish_patiently(self, subject: str, data: bytes) -> Published:
        """As `publish`, for who has nothing better to do than wait until it is stored."""
        return await self.patience.until_done(lambda: self.publish(subject, data), subject)

    async def get(self, subject: str) -> Record | None:
        return await self.inner.get(subject)

    def read(
        self, filters: Sequence[str], *, after_sequence: int = 0, follow: bool = True, headers_only: bool = False
    ) -> AbstractAsyncContextManager[AsyncIterator[Record]]:
        return self.inner.read(filters, after_sequence=after_sequence, follow=follow, headers_only=headers_only)

    def read_batches(
        self, filters: Sequence[str], *, after_sequence: int = 0, follow: bool = True
    ) -> AbstractAsyncContextManager[AsyncIterator[RecordBatch]]:
        return self.inner.read_batches(filters, after_sequence=after_sequence, follow=follow)

    def consume(
        self, durable: str, filters: Sequence[str], settings: ConsumerSettings
    ) -> AbstractAsyncContextManager[AsyncIterator[Delivery]]:
        return self.inner.consume(durable, filters, settings)

    async def load_state(self, key: str) -> tuple[bytes, int] | None:
        return await self.inner.load_state(key)

    async def save_state(self, key: str, data: bytes, *, expected_revision: int | None = None) -> int:
        return await self.inner.save_state(key, data, expected_revision=expected_revision)

    async def list_state(self, prefix: str) -> Mapping[str, tuple[bytes, int]]:
        return await self.inner.list_state(prefix)

    async def delete_state(self, key: str) -> None:
        await self.inner.delete_state(key)

    async def announce(self, subject: str, data: bytes) -> None:
        await self.inner.announce(subject, data)

    def listen(self, pattern: str) -> AbstractAsyncContextManager[AsyncIterator[tuple[str, bytes]]]:
        return self.inner.listen(pattern)

    async def request(self, subject: str, data: bytes, *, deadline_s: float) -> bytes:
        return await self.inner.request(subject, data, deadline_s=deadline_s)

    def serve(self, subject: str, handler: Callable[[bytes], Awaitable[bytes]]) -> AbstractAsyncContextManager[None]:
        return self.inner.serve(subject, handler)

    async def consumers(self) -> list[ConsumerStatus]:
        return await self.inner.consumers()

    async def log_status(self) -> LogStatus:
        return await self.inner.log_status()

    async def purge_below(self, sequence: int, *, pattern: str = "") -> int:
        return await self.inner.purge_below(sequence, pattern=pattern)
