"""The `Broker` port over JetStream: one connection for the log, one for payloads."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from broker.api import (
    ALL_CAPABILITIES,
    Capability,
    CollectablePayloads,
    ConsumerSettings,
    ConsumerStatus,
    Delivery,
    LogStatus,
    Published,
    Record,
    RecordBatch,
)
from broker.directory import DirectoryPayloads
from broker.errors import NoSuchStreamError
from broker.jetstream import talk
from broker.jetstream.admin import Admin, list_consumers
from broker.jetstream.api import ApiError, Code, call
from broker.jetstream.consume import consume
from broker.jetstream.link import ConnectionState, Link
from broker.jetstream.opening import open_link
from broker.jetstream.payloads import JetStreamPayloads
from broker.jetstream.publish import Publisher, get_last
from broker.jetstream.read import read, read_batches
from broker.jetstream.state import State
from broker.naming import check_log_filters, check_log_subject, run_names
from broker.settings import ConnectSettings
from broker.shapes import ConsumerInfo, Purged, StreamInfo
from broker.topology import RunLimits, run_topology


class JetStreamBroker:
    """One run on one pair of connections. Made by `open_broker`."""

    def __init__(self, link: Link, payload_link: Link, run: str, replicas: int, payloads: CollectablePayloads) -> None:
        self._names = run_names(run)
        self._link = link
        self._payload_link = payload_link
        self._replicas = replicas
        self._publisher = Publisher(link, self._names.log_stream)
        self._state = State(link, self._names)
        self._payloads = payloads

    @property
    def run(self) -> str:
        return self._names.run

    @property
    def capabilities(self) -> frozenset[Capability]:
        return ALL_CAPABILITIES

    @property
    def payloads(self) -> CollectablePayloads:
        return self._payloads

    @property
    def admin(self) -> Admin:
        """Making and comparing streams over this connection, if its rights allow."""
        return Admin(self._link)

    def connections(self) -> list[ConnectionState]:
        """What the connections are doing: for the log, for payloads."""
        return [self._link.state(), self._payload_link.state()]

    async def publish(self, subject: str, data: bytes, *, headers: Mapping[str, str] | None = None) -> Published:
        check_log_subject(self._names, subject)
        return await self._publisher.create(subject, data, headers)

    async def get(self, subject: str) -> Record | None:
        check_log_subject(self._names, subject)
        stored = await get_last(self._link, self._names.log_stream, subject)
        return None if stored is None else stored.record

    def read(
        self, filters: Sequence[str], *, after_sequence: int = 0, follow: bool = True, headers_only: bool = False
    ) -> AbstractAsyncContextManager[AsyncIterator[Record]]:
        patterns = tuple(filters)
        check_log_filters(self._names, patterns)
        return read(
            self._link, self._names.log_stream, patterns, after_sequence, follow=follow, headers_only=headers_only
        )

    def read_batches(
        self, filters: Sequence[str], *, after_sequence: int = 0, follow: bool = True
    ) -> AbstractAsyncContextManager[AsyncIterator[RecordBatch]]:
        patterns = tuple(filters)
        check_log_filters(self._names, patterns)
        return read_batches(self._link, self._names.log_stream, patterns, after_sequence, follow=follow)

    def consume(
        self, durable: str, filters: Sequence[str], settings: ConsumerSettings
    ) -> AbstractAsyncContextManager[AsyncIterator[Delivery]]:
        patterns = tuple(filters)
        check_log_filters(self._names, patterns)
        return consume(self._link, self._names.log_stream, durable, patterns, settings, self._replicas)

    async def load_state(self, key: str) -> tuple[bytes, int] | None:
        return await self._state.load(key)

    async def save_state(self, key: str, data: bytes, *, expected_revision: int | None = None) -> int:
        return await self._state.save(key, data, expected_revision)

    async def list_state(self, prefix: str) -> Mapping[str, tuple[bytes, int]]:
        return await self._state.list(prefix)

    async def delete_state(self, key: str) -> None:
        await self._state.delete(key)

    async def announce(self, subject: str, data: bytes) -> None:
        talk.announce(self._link, subject, data)

    def listen(self, pattern: str) -> AbstractAsyncContextManager[AsyncIterator[tuple[str, bytes]]]:
        return talk.listen(self._link, pattern)

    async def request(self, subject: str, data: bytes, *, deadline_s: float) -> bytes:
        return await talk.request(self._link, subject, data, deadline_s)

    def serve(self, subject: str, handler: Callable[[bytes], Awaitable[bytes]]) -> AbstractAsyncContextManager[None]:
        return talk.serve(self._link, subject, handler)

    async def consumers(self) -> list[ConsumerStatus]:
        return [_status(info) for info in await list_consumers(self._link, self._names.log_stream)]

    async def log_status(self) -> LogStatus:
        log = await _stream(self._link, self._names.log_stream)
        payloads = await _stream(self._link, self._names.payload_stream)
        return LogStatus(
            first_sequence=log.state.first_seq,
            last_sequence=log.state.last_seq,
            num_messages=log.state.messages,
            size_bytes=log.state.bytes,
            max_bytes=log.config.max_bytes,
            payload_bytes=payloads.state.bytes,
            payload_max_bytes=payloads.config.max_bytes,
            connected_url=self._link.state().url,
        )

    async def purge_below(self, sequence: int, *, pattern: str = "") -> int:
        body: dict[str, object] = {"seq": sequence}
        if pattern:
            check_log_filters(self._names, (pattern,))
            body["filter"] = pattern
        return (await call(self._link, f"STREAM.PURGE.{self._names.log_stream}", body, Purged)).purged


def _status(info: ConsumerInfo) -> ConsumerStatus:
    return ConsumerStatus(
        durable=info.name,
        filters=info.config.filters,
        delivered=info.delivered.stream_seq,
        ack_floor=info.ack_floor.stream_seq,
        num_pending=info.num_pending,
        num_ack_pending=info.num_ack_pending,
        num_redelivered=info.num_redelivered,
        num_waiting=info.num_waiting,
    )


async def _stream(link: Link, name: str) -> StreamInfo:
    try:
        return await call(link, f"STREAM.INFO.{name}", None, StreamInfo)
    except ApiError as error:
        if error.err_code == Code.STREAM_NOT_FOUND:
            raise NoSuchStreamError(f"expected the stream {name} on this broker, found none") from error
        raise


@asynccontextmanager
async def open_broker(
    urls: list[str],
    run: str,
    settings: ConnectSettings,
    *,
    create: bool = False,
    limits: RunLimits | None = None,
) -> AsyncGenerator[JetStreamBroker]:
    """A run on a NATS server.

    Raises:
        NotConnectedError: no server within the deadline.
        NoSuchStreamError: the run has no streams there, and `create` is False.
        TopologyError: its streams stand there with other settings.
    """
    names = run_names(run)
    async with open_link(urls, settings) as link, open_link(urls, settings, role="payloads") as payload_link:
        if create:
            await Admin(link).apply(run_topology(run, limits))
        info = await _stream(link, names.log_stream)
        if info.config.num_replicas > 1:
            await link.follow_leaders({names.log_stream: names.log_prefix, names.state_stream: names.state_prefix})
            await payload_link.follow_leaders({names.payload_stream: names.payload_prefix})
        payloads = (
            DirectoryPayloads(
                settings.payload_dir, fsync=settings.payload_fsync, renew_after_s=settings.payload_renew_after_s
            )
            if settings.payload_dir
            else JetStreamPayloads(payload_link, names)
        )
        yield JetStreamBroker(link, payload_link, run, info.config.num_replicas, payloads)
