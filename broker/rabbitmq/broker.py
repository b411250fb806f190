"""The `Broker` port over RabbitMQ: one connection, the fold of the run's stream, and a folder that all workers share."""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from pathlib import Path
from typing import Final

import anyio
import anyio.abc
import msgspec
import structlog

from broker.api import (
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
from broker.batches import batch_of
from broker.directory import DirectoryPayloads
from broker.errors import BrokerError, NoSuchStreamError, NotConnectedError, TooLargeError, TopologyError
from broker.iterating import Iterating
from broker.naming import any_matches, check_literal, check_log_filters, check_log_subject, run_names
from broker.rabbitmq.beside import running_beside
from broker.rabbitmq.dispatcher import Dispatcher, position_key, read_position
from broker.rabbitmq.follower import Follower
from broker.rabbitmq.index import IndexSnapshot, Kind, LogIndex
from broker.rabbitmq.link import LOST, ConnectionState, Link, open_beside, open_link
from broker.rabbitmq.parked import ParkedWork
from broker.rabbitmq.publish import Publisher
from broker.rabbitmq.queues import (
    create_stream,
    dead_queue,
    declare_dead,
    declare_work,
    find_stream,
    stream_queue,
    work_queue,
)
from broker.rabbitmq.read import read
from broker.rabbitmq.state import FolderState
from broker.rabbitmq.talk import Talk
from broker.rabbitmq.wire import MAX_MESSAGE_BYTES
from broker.rabbitmq.work import HOLD_S, Share, consume
from broker.settings import ConnectSettings
from broker.topology import RunLimits, difference, durable

log = structlog.get_logger("broker")

_SNAPSHOT_EVERY: Final = 20_000
_SNAPSHOT_KEY: Final = "index"


class RabbitBroker:
    """One run on one connection. Made by `open_broker`."""

    def __init__(
        self, link: Link, run: str, folder: Path, index: LogIndex, limits: RunLimits, tasks: anyio.abc.TaskGroup
    ) -> None:
        self._names = run_names(run)
        self._link: Final = link
        self._tasks: Final = tasks
        self._limits: Final = limits
        self._stream: Final = stream_queue(run)
        self._state: Final = FolderState(folder / "state")
        self._parked: Final = ParkedWork(folder / "parked")
        self._payloads: Final = DirectoryPayloads(folder / "payloads", fsync=link.settings.payload_fsync)
        self._follower: Final = Follower(link, self._stream, index)
        self._publisher: Final = Publisher(link, self._stream, self._follower, limits.log_max_bytes)
        self._talk: Final = Talk(link)
        self._dispatcher: Final = Dispatcher(
            link,
            run,
            secrets.token_hex(6),
            self._follower,
            self._state,
            self._parked,
            self._read_for_dispatch,
            self._get_by_sequence,
        )
        self._dispatches = False

    async def start(self) -> None:
        """Begin to follow; returns when everything that stood before is folded."""
        self._tasks.start_soon(self._follower.run)
        self._tasks.start_soon(self._publisher.run)
        self._tasks.start_soon(self._talk.run)
        await self._publisher.mark()

    async def stop(self) -> None:
        """Let another process dispatch."""
        if self._dispatches:
            with suppress(BrokerError):
                await self._dispatcher.stop()

    @property
    def run(self) -> str:
        return self._names.run

    @property
    def capabilities(self) -> frozenset[Capability]:
        return frozenset()

    @property
    def payloads(self) -> CollectablePayloads:
        return self._payloads

    def connections(self) -> list[ConnectionState]:
        """What the connection is doing."""
        return [self._link.state]

    async def publish(self, subject: str, data: bytes, *, headers: Mapping[str, str] | None = None) -> Published:
        check_log_subject(self._names, subject)
        return await self._publisher.create(subject, data, headers)

    async def get(self, subject: str) -> Record | None:
        check_log_subject(self._names, subject)
        found = await self._publisher.get(subject)
        if found is None:
            await self._publisher.mark()  # what others wrote just before is seen, too
            found = await self._publisher.get(subject)
        return found

    @asynccontextmanager
    async def read(
        self, filters: Sequence[str], *, after_sequence: int = 0, follow: bool = True, headers_only: bool = False
    ) -> AsyncGenerator[AsyncIterator[Record]]:
        patterns = tuple(filters)
        check_log_filters(self._names, patterns)
        last: int | None = None
        if not follow:
            await self._publisher.mark()
            last = self._follower.index.last_sequence
        async with read(
            self._link, self._stream, self._follower, patterns, after_sequence, last=last, headers_only=headers_only
        ) as records:
            yield records

    def _read_for_dispatch(
        self, filters: tuple[str, ...], after_sequence: int
    ) -> AbstractAsyncContextManager[AsyncIterator[Record]]:
        return self.read(filters, after_sequence=after_sequence)

    async def _get_by_sequence(self, sequence: int) -> Record | None:
        subject = self._follower.index.subject_of(sequence)
        return await self._publisher.get(subject) if subject else None

    @asynccontextmanager
    async def read_batches(
        self, filters: Sequence[str], *, after_sequence: int = 0, follow: bool = True
    ) -> AsyncGenerator[AsyncIterator[RecordBatch]]:
        async with self.read(filters, after_sequence=after_sequence, follow=follow) as records:

            async def take() -> RecordBatch:
                return batch_of([await anext(records)])

            yield Iterating(take)

    @asynccontextmanager
    async def consume(
        self, durable: str, filters: Sequence[str], settings: ConsumerSettings
    ) -> AsyncGenerator[AsyncIterator[Delivery]]:
        patterns = tuple(filters)
        check_log_filters(self._names, patterns)
        await self._declare(durable, list(patterns), settings)
        if not self._dispatches:
            self._dispatches = True
            self._tasks.start_soon(self._dispatcher.run)
        async with (
            open_beside(
                self._link
            ) as link,  # RabbitMQ ends the connection of whoever consumes from a queue killed at its birth
            consume(Share(link, self.run, durable, settings, self._parked, HOLD_S)) as deliveries,
        ):
            yield deliveries

    async def _declare(self, name: str, filters: list[str], settings: ConsumerSettings) -> None:
        """Declare a durable, once.

        Raises:
            TopologyError: it stands there with other settings.
        """
        check_literal(name)
        wanted = durable(name, filters, settings)
        if name not in self._follower.index.durables:
            await self._publisher.control(Kind.DURABLE, name, msgspec.msgpack.encode(wanted))
        differs = difference(wanted, self._follower.index.durables[name], f"durable {name!r}")
        if differs:
            raise TopologyError("; ".join(differs))

    async def load_state(self, key: str) -> tuple[bytes, int] | None:
        check_literal(key)
        return await self._state.load(f"value-{key}")

    async def save_state(self, key: str, data: bytes, *, expected_revision: int | None = None) -> int:
        check_literal(key)
        if len(data) > MAX_MESSAGE_BYTES:
            raise TooLargeError(f"state {key!r}: expected at most {MAX_MESSAGE_BYTES} bytes, found {len(data)}")
        return await self._state.save(f"value-{key}", data, expected_revision)

    async def list_state(self, prefix: str) -> Mapping[str, tuple[bytes, int]]:
        check_literal(prefix)
        found = await self._state.values(f"value-{prefix}.")
        return {key.removeprefix("value-"): value for key, value in found.items()}

    async def delete_state(self, key: str) -> None:
        check_literal(key)
        await self._state.delete(f"value-{key}")

    async def announce(self, subject: str, data: bytes) -> None:
        await self._talk.announce(subject, data)

    def listen(self, pattern: str) -> AbstractAsyncContextManager[AsyncIterator[tuple[str, bytes]]]:
        return self._talk.listen(pattern)

    async def request(self, subject: str, data: bytes, *, deadline_s: float) -> bytes:
        return await self._talk.request(subject, data, deadline_s)

    def serve(self, subject: str, handler: Callable[[bytes], Awaitable[bytes]]) -> AbstractAsyncContextManager[None]:
        return self._talk.serve(subject, handler)

    async def consumers(self) -> list[ConsumerStatus]:
        found: list[ConsumerStatus] = []
        index = self._follower.index
        parked = await self._parked.all()
        for spec in list(index.durables.values()):
            position = await self._state.load(position_key(spec.name))
            fed = read_position(position[0])[0] if position else 0
            filters = tuple(spec.filters)
            behind = sum(
                any_matches(filters, index.subject_of(sequence))
                for sequence in range(max(fed + 1, index.first_sequence), index.last_sequence + 1)
            )
            waiting = await self._num_ready(spec.name)
            found.append(
                ConsumerStatus(
                    durable=spec.name,
                    filters=list(spec.filters),
                    delivered=fed,
                    ack_floor=0,
                    num_pending=behind + waiting,
                    num_ack_pending=sum(one.durable == spec.name for one in parked),
                    num_redelivered=0,
                    num_waiting=0,
                )
            )
        return found

    async def _num_ready(self, name: str) -> int:
        try:
            async with self._link.channel() as channel:
                await declare_dead(channel, self.run)
                return await declare_work(channel, self.run, name)
        except LOST:
            return 0

    async def log_status(self) -> LogStatus:
        await self._publisher.mark()
        index = self._follower.index
        return LogStatus(
            first_sequence=index.first_sequence,
            last_sequence=index.last_sequence,
            num_messages=len(index),
            size_bytes=index.size_bytes,
            max_bytes=self._limits.log_max_bytes,
            payload_bytes=0,
            connected_url=self._link.url,
        )

    async def purge_below(self, sequence: int, *, pattern: str = "") -> int:
        if pattern:
            check_log_filters(self._names, (pattern,))
        await self._publisher.mark()
        before = len(self._follower.index)
        await self._publisher.control(Kind.PURGE, pattern, str(sequence).encode())
        return max(before - len(self._follower.index), 0)

    async def save_snapshot(self) -> None:
        """Save the index, so that whoever connects later need not read the whole stream."""
        data = msgspec.msgpack.encode(self._follower.index.snapshot())
        await self._state.save(_SNAPSHOT_KEY, data, None)

    async def keep_snapshots(self) -> None:
        """Save the index now and then, where the dispatcher is; for ever."""
        saved = self._follower.index.next_offset
        while True:
            await anyio.sleep(5.0)
            if self._dispatches and self._follower.index.next_offset - saved >= _SNAPSHOT_EVERY:
                saved = self._follower.index.next_offset
                await self.save_snapshot()


@asynccontextmanager
async def open_broker(
    urls: list[str],
    run: str,
    settings: ConnectSettings,
    *,
    create: bool = False,
    limits: RunLimits | None = None,
) -> AsyncGenerator[RabbitBroker]:
    """A run on a RabbitMQ. `settings.payload_dir` is the folder for payloads and last values, which all workers share.

    Raises:
        NotConnectedError, NotAllowedError: no connection.
        NoSuchStreamError: the run has no stream there, and `create` is False.
        BrokerError: no folder is given.
    """
    run_names(run)
    if not settings.payload_dir:
        raise BrokerError(
            "RabbitMQ keeps no payloads: expected broker.payloads = a folder that all workers share, found none"
        )
    folder = Path(settings.payload_dir) / run
    async with open_link(urls, settings) as link:
        await _find_or_create(link, run, folder, create=create)
        snapshot = await FolderState(folder / "state").load(_SNAPSHOT_KEY)
        index = (
            LogIndex()
            if snapshot is None
            else LogIndex.restored(msgspec.msgpack.decode(snapshot[0], type=IndexSnapshot))
        )
        async with running_beside() as tasks:
            broker = RabbitBroker(link, run, folder, index, limits or RunLimits(), tasks)
            await broker.start()
            tasks.start_soon(broker.keep_snapshots)
            try:
                yield broker
            finally:
                with anyio.CancelScope(shield=True):
                    await broker.stop()


async def _find_or_create(link: Link, run: str, folder: Path, *, create: bool) -> None:
    """See that the run's stream is there, also on a server that has just started and answers some calls never.

    Raises:
        NoSuchStreamError: it is not.
        NotConnectedError: no answer.
        BrokerError: it would have to be made beside what belongs to an earlier one.
    """
    reason = ""
    deadline_s = link.settings.publish_deadline_s
    with anyio.move_on_after(deadline_s):
        while True:
            try:
                async with link.channel() as channel:
                    try:
                        await find_stream(channel, run)
                    except NoSuchStreamError:
                        if not create:
                            raise
                        await _refuse_leftovers(link, run, folder)
                        await create_stream(link, run)
            except LOST as error:
                reason = str(error)
                await anyio.sleep(link.settings.reconnect_wait_s)
            else:
                return
    raise NotConnectedError(
        f"expected the RabbitMQ at {link.url} to answer for the stream {stream_queue(run)} within "
        f"{deadline_s} s, found no answer ({reason or 'it is silent'})"
    )


async def _refuse_leftovers(link: Link, run: str, folder: Path) -> None:
    """The index and the positions of a stream that is gone would hide and skip messages of a new one.

    Raises:
        BrokerError: there are some.
    """
    if await FolderState(folder / "state").values(""):
        raise BrokerError(
            f"expected the stream {stream_queue(run)} at {link.url}, whose index and positions are in {folder}, found none: "
            "give the run another id, or remove that folder if its log is really gone"
        )


async def delete_run(url: str, run: str, settings: ConnectSettings) -> None:
    """Delete a run's queues, if it has any. Its folder stays.

    Raises:
        NotConnectedError, NotAllowedError: no connection.
    """
    try:
        async with open_broker([url], run, settings) as broker:
            durables = [spec.durable for spec in await broker.consumers()]
    except NoSuchStreamError:
        return
    async with open_link([url], settings) as link, link.channel() as channel:
        for queue in [*(work_queue(run, name) for name in durables), dead_queue(run), stream_queue(run)]:
            await channel.delete(queue)
