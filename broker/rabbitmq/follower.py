"""Reads a run's stream as long as its connection is open and folds it: what stands, how it is numbered, the newest in memory.

A connection that breaks is read anew from where the fold stands. It must not know who waits for what.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

import anyio
import msgspec
import structlog
from aiormq.abc import DeliveredMessage

from broker.rabbitmq.channel import Channel
from broker.rabbitmq.incoming import QUIET_S, Incoming
from broker.rabbitmq.index import Kind, LogIndex
from broker.rabbitmq.link import LOST, Link
from broker.rabbitmq.tail import Tail
from broker.rabbitmq.wire import Written, offset_of, read_written
from broker.topology import DurableSpec

log = structlog.get_logger("broker")

PREFETCH: Final = 512

Written_ = Callable[[Written, int], None]
"""Gets each message of the stream as it is folded, with its sequence, 0 for one that does not count."""


class Follower:
    """The fold of one connection."""

    def __init__(self, link: Link, stream: str, index: LogIndex, *, quiet_s: float = QUIET_S) -> None:
        self.index: Final = index
        self.tail: Final = Tail()
        self.tail.forget_below(index.last_sequence + 1)
        self._link: Final = link
        self._stream: Final = stream
        self._quiet_s: Final = quiet_s
        self._changed = asyncio.Event()
        self._on_written: Final[set[Written_]] = set()

    def on_written(self, see: Written_) -> Callable[[], None]:
        """Call `see` for each message from now on, until the returned function is called."""
        self._on_written.add(see)
        return lambda: self._on_written.discard(see)

    async def changed(self) -> None:
        """Wait until something more is folded."""
        await self._changed.wait()

    async def run(self) -> None:
        """Follow for ever."""
        while True:
            try:
                async with self._link.channel(prefetch=PREFETCH) as channel:
                    await self._follow(channel)
            except LOST as error:
                log.debug("the log's reader lost its channel", reason=str(error))
            await anyio.sleep(0.05)

    async def _follow(self, channel: Channel) -> None:
        incoming = Incoming(channel)
        await incoming.open_stream(self._stream, self.index.next_offset)
        while True:
            self._fold(await incoming.next_of_stream(self._quiet_s))

    def _fold(self, message: DeliveredMessage) -> None:
        written = read_written(message)
        if written is None:
            if self.index.pass_over(offset_of(message)):
                log.warning("a message that is none of the log lies in the stream", stream=self._stream)
            return
        if written.offset < self.index.next_offset:
            return
        sequence = self._take_in(written)
        for see in tuple(self._on_written):
            see(written, sequence)
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def _take_in(self, written: Written) -> int:
        match written.kind:
            case Kind.MESSAGE:
                size = len(written.subject) + len(written.data)
                sequence = self.index.accept(written.offset, written.subject, written.digest, size)
                if sequence:
                    self.tail.add(written.record(sequence))
                return sequence
            case Kind.PURGE:
                self.index.pass_over(written.offset)
                self.index.purge_below(int(written.data), written.subject)
                self.tail.forget_below(self.index.first_sequence)
            case Kind.DURABLE:
                self.index.pass_over(written.offset)
                self.index.declare(msgspec.msgpack.decode(written.data, type=DurableSpec))
            case Kind.MARK:
                self.index.pass_over(written.offset)
        return 0
