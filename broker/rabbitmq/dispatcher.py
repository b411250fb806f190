"""Feeds the durables' queues from the log. Any process with a share of a durable offers to; one at a time does.

    lease (a last value) ─▶ per durable: log after its position ─▶ its queue, confirmed ─▶ position saved
                         └▶ what is parked and due, what was handed out too often ─▶ its queue again

Each queue is fed on a channel of its own: one that was killed at its birth blocks the channel at its first publish.

A dispatcher that dies is followed by another after the lease; what lies between its last saved position and its death is put into the
queues twice, which a stage's created-once outputs make harmless.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Final, Protocol

import aiormq
import anyio
import anyio.abc
import msgspec
import structlog

from broker.api import Record
from broker.errors import ConflictError, NotConnectedError, StoreFullError
from broker.rabbitmq import queues
from broker.rabbitmq.channel import Channel, SilentError
from broker.rabbitmq.follower import Follower
from broker.rabbitmq.incoming import Incoming
from broker.rabbitmq.link import LOST, Link, open_beside
from broker.rabbitmq.parked import ParkedWork
from broker.rabbitmq.queues import (
    Task,
    dead_queue,
    declare_dead,
    declare_work,
    is_there,
    publish_task,
    read_task,
    work_queue,
)
from broker.rabbitmq.state import FolderState
from broker.topology import DurableSpec

log = structlog.get_logger("broker")

LEASE_S: Final = 3.0
_LEASE_KEY: Final = "dispatcher"
_WINDOW: Final = 256
"""Tasks of one durable that wait for their confirmation."""
MAX_READY: Final = 10_000
"""A queue with so many waiting tasks is fed no further: the log is the better place to wait in."""
_SAVE_EVERY_S: Final = 0.5
_PARKED_PERIOD_S: Final = 0.1
_YOUNG: Final = "~"
_STILLBORN_S: Final = 5.0
"""A new queue that has confirmed nothing for so long never will."""
_DEAD_SETTLED_KEY: Final = "dead-settled"
"""The last value that says that the dead-letter queue outlives a kill of its server."""


class _StillbornQueueError(Exception):
    """A queue that was declared a moment before its server was killed confirms nothing."""


class Lease(msgspec.Struct, frozen=True, kw_only=True):
    """Who dispatches, and until when."""

    owner: str
    until_unix_s: float


class ReadLog(Protocol):
    """Reads the log after a sequence."""

    def __call__(
        self, filters: tuple[str, ...], after_sequence: int
    ) -> AbstractAsyncContextManager[AsyncIterator[Record]]: ...


def position_key(durable: str) -> str:
    """The last value that says how far a durable is fed."""
    return f"fed-{durable}"


def position_bytes(position: int, *, is_young: bool) -> bytes:
    """How far a durable is fed, and whether its queue may still be lost by a kill of its server."""
    return f"{position}{_YOUNG if is_young else ''}".encode()


def read_position(saved: bytes) -> tuple[int, bool]:
    """See `position_bytes`."""
    text = saved.decode()
    return int(text.removesuffix(_YOUNG)), text.endswith(_YOUNG)


class Dispatcher:
    """See the module."""

    def __init__(
        self,
        link: Link,
        run: str,
        owner: str,
        follower: Follower,
        state: FolderState,
        parked: ParkedWork,
        read_log: ReadLog,
        get: Callable[[int], Awaitable[Record | None]],
    ) -> None:
        self._main: Final = link
        self._link = link
        """Its own while it runs: a queue that is made anew may take the connection along."""
        self._run: Final = run
        self._owner: Final = owner
        self._follower: Final = follower
        self._state: Final = state
        self._parked: Final = parked
        self._read: Final = read_log
        self._get: Final = get
        self._revision = 0
        self._scope: Final = anyio.CancelScope()
        self._ended: Final = anyio.Event()
        self._stopping = False

    async def run(self) -> None:
        """Dispatch whenever nobody else does, until `stop`."""
        async with open_beside(self._main) as self._link:
            try:
                with self._scope:
                    await self._run_on()
            finally:
                self._ended.set()

    async def _run_on(self) -> None:
        while True:
            if await self._take_lease():
                log.info("dispatching", run=self._run)
                try:
                    await self._dispatch()
                except* LOST as group:
                    log.debug("the dispatcher lost its channel", reason=str(group.exceptions[0]))
                except* (ConflictError, NotConnectedError, StoreFullError) as group:
                    log.warning("dispatching ended", reason=str(group.exceptions[0]))
            await anyio.sleep(LEASE_S / 6)

    async def _take_lease(self) -> bool:
        """Hold the lease if it is free, ours or over."""
        found = await self._state.load(_LEASE_KEY)
        revision = 0
        if found is not None:
            lease, revision = msgspec.msgpack.decode(found[0], type=Lease), found[1]
            if lease.owner != self._owner and lease.until_unix_s > time.time():
                return False
        try:
            self._revision = await self._save_lease(revision)
        except ConflictError:
            return False
        return True

    async def _save_lease(self, revision: int) -> int:
        lease = Lease(owner=self._owner, until_unix_s=time.time() + LEASE_S)
        return await self._state.save(_LEASE_KEY, msgspec.msgpack.encode(lease), revision)

    async def stop(self) -> None:
        """End, with all positions saved, then let somebody else dispatch at once: it goes on from there."""
        self._stopping = True
        self._scope.cancel()
        with anyio.move_on_after(LEASE_S):
            await self._ended.wait()
        found = await self._state.load(_LEASE_KEY)
        if found is not None and msgspec.msgpack.decode(found[0], type=Lease).owner == self._owner:
            try:
                over = Lease(owner=self._owner, until_unix_s=0.0)
                await self._state.save(_LEASE_KEY, msgspec.msgpack.encode(over), found[1])
            except ConflictError:
                return  # somebody else has it already

    async def _dispatch(self) -> None:
        """Until the lease or the connection is lost."""
        async with self._link.channel() as channel, anyio.create_task_group() as tasks:
            tasks.start_soon(self._keep_lease)
            tasks.start_soon(self._anew, self._unpark)
            tasks.start_soon(self._anew, self._return_dead)
            tasks.start_soon(self._feed_all, tasks)
            await channel.until_closed()
            raise ConnectionResetError("the dispatcher's channel closed")

    async def _anew(self, work: Callable[[Channel], Awaitable[None]]) -> None:
        """For ever, on a channel of its own: what it loses stops nothing else."""
        while True:
            try:
                async with self._link.channel(confirms=True) as channel:
                    await work(channel)
            except* LOST as group:
                log.debug("the dispatcher lost a channel", reason=str(group.exceptions[0]))
            await anyio.sleep(0.05)

    async def _keep_lease(self) -> None:
        while True:
            await anyio.sleep(LEASE_S / 3)
            self._revision = await self._save_lease(self._revision)

    async def _feed_all(self, tasks: anyio.abc.TaskGroup) -> None:
        """Begin to feed each durable as it is declared."""
        fed: set[str] = set()
        while True:
            for spec in list(self._follower.index.durables.values()):
                if spec.name not in fed:
                    fed.add(spec.name)
                    tasks.start_soon(self._anew, partial(self._feed, spec))
            await self._follower.changed()

    async def _feed(self, spec: DurableSpec, channel: Channel) -> None:
        """For ever; a queue that never answers since the server was killed at its birth is made anew."""
        try:
            await self._feed_queue(spec, channel)
        except* _StillbornQueueError:
            log.warning("a queue that does not answer since its birth is made anew", durable=spec.name)
            await self._state.save(position_key(spec.name), position_bytes(0, is_young=True), None)
            async with self._link.channel() as other:
                await other.delete(work_queue(self._run, spec.name))

    async def _feed_queue(self, spec: DurableSpec, channel: Channel) -> None:
        key = position_key(spec.name)
        found = await self._state.load(key)
        position, is_young = read_position(found[0]) if found else (0, True)
        if not await is_there(self._link, work_queue(self._run, spec.name)):
            position = 0  # a new queue, or one that was lost with all that was fed: what is done already is done again, harmlessly
        await declare_dead(channel, self._run)
        try:
            await declare_work(channel, self._run, spec.name)
        except SilentError as error:
            if is_young:
                raise _StillbornQueueError from error
            raise
        feeding = _Feeding(channel, self._run, spec.name, position, is_young=is_young)
        async with self._read(tuple(spec.filters), position) as records, anyio.create_task_group() as tasks:
            tasks.start_soon(self._save_positions, key, feeding)
            async for record in records:
                await feeding.put(record, tasks)

    async def _save_positions(self, key: str, feeding: _Feeding) -> None:
        saved, is_young = feeding.position, True
        try:
            await anyio.sleep(queues.SETTLE_S)  # a queue that is lost before that must be fed from where it began
            is_young = False
            while True:
                await anyio.sleep(_SAVE_EVERY_S)
                if feeding.position != saved:
                    saved = feeding.position
                    await self._state.save(key, position_bytes(saved, is_young=False), None)
        finally:
            # what a young queue was fed counts at a good end only: a killed server may have lost it
            if feeding.position != saved and (self._stopping or not is_young):
                with anyio.CancelScope(shield=True):
                    await self._state.save(key, position_bytes(feeding.position, is_young=is_young), None)

    async def _unpark(self, channel: Channel) -> None:
        while True:
            for parked in await self._parked.due():
                record = await self._get(parked.sequence)
                if record is not None:
                    await publish_task(channel, self._run, Task.of(parked.durable, record, parked.num_delivered))
                await self._parked.remove(parked)
            await anyio.sleep(_PARKED_PERIOD_S)

    async def _return_dead(self, confirmed: Channel) -> None:
        """What its queue handed out too often goes back with its count: the pipeline gives it up, and says why."""
        await declare_dead(confirmed, self._run)
        async with self._link.channel(prefetch=16) as channel, anyio.create_task_group() as tasks:
            incoming = Incoming(channel)
            try:
                await incoming.open_queue(dead_queue(self._run))
            except SilentError:
                await self._renew_dead()
                raise
            tasks.start_soon(self._note_settled)
            while True:
                message = await incoming.next()
                found = read_task(message)
                if found is not None:
                    task, delivered = found
                    again = msgspec.structs.replace(task, num_before=task.num_before + max(delivered, 1))
                    await publish_task(confirmed, self._run, again)
                await channel.ack(message)

    async def _note_settled(self) -> None:
        await anyio.sleep(queues.SETTLE_S)
        if await self._state.load(_DEAD_SETTLED_KEY) is None:
            await self._state.save(_DEAD_SETTLED_KEY, b"", None)

    async def _renew_dead(self) -> None:
        """Delete the dead-letter queue if its server was killed at its birth."""
        if await self._state.load(_DEAD_SETTLED_KEY) is None:
            log.warning("the dead-letter queue does not answer since its birth and is made anew", run=self._run)
            async with self._link.channel() as other:
                await other.delete(dead_queue(self._run))


class _Feeding:
    """One durable's way from the log into its queue: many tasks at a time, the position behind the oldest unconfirmed."""

    def __init__(self, channel: Channel, run: str, durable: str, position: int, *, is_young: bool) -> None:
        self.position = position
        self._may_be_stillborn = is_young
        """Nothing fed into the queue has been noted or confirmed yet: it may be made anew without loss."""
        self._is_proven = False
        """The queue has confirmed something on this channel."""
        self._channel: Final = channel
        self._run: Final = run
        self._durable: Final = durable
        self._window = anyio.Semaphore(_WINDOW)
        self._under_way: deque[list[int | bool]] = deque()
        """[sequence, whether it is confirmed], in the order of the log."""
        self._since_look = 0

    async def put(self, record: Record, tasks: anyio.abc.TaskGroup) -> None:
        """Begin to put a record into the queue; waits while too much is under way or waits there."""
        self._since_look += 1
        if self._since_look >= MAX_READY // 10:
            self._since_look = 0
            while await declare_work(self._channel, self._run, self._durable) > MAX_READY:
                await anyio.sleep(0.2)
        await self._window.acquire()
        place: list[int | bool] = [record.sequence, False]
        self._under_way.append(place)
        if self._is_proven:
            tasks.start_soon(self._publish, record, place)
        else:  # a queue that is not ready yet refuses, and what comes behind would overtake it
            await self._publish(record, place)

    async def _publish(self, record: Record, place: list[int | bool]) -> None:
        try:
            while True:
                with anyio.move_on_after(_STILLBORN_S if self._may_be_stillborn else None) as scope:
                    await self._publish_patiently(record)
                if not scope.cancelled_caught:
                    break
                if self._may_be_stillborn:
                    raise _StillbornQueueError
        finally:
            self._window.release()
        self._may_be_stillborn = False
        self._is_proven = True
        place[1] = True
        while self._under_way and self._under_way[0][1]:
            self.position = int(self._under_way.popleft()[0])

    async def _publish_patiently(self, record: Record) -> None:
        while True:
            try:
                return await publish_task(self._channel, self._run, Task.of(self._durable, record))
            except aiormq.exceptions.DeliveryError:
                await anyio.sleep(0.2)  # the queue refuses for now: try again
