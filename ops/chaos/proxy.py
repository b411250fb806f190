"""Stands between all workers and one broker node, and plays a bad network: cuts, delays, silence, lost acknowledgements.

It must not know runs. Bytes go through untouched and in order but for what a fault does to single frames.
"""

from __future__ import annotations

import asyncio
import random
import socket
import struct
from typing import Final, Self

import msgspec
import structlog

from ops.chaos.frames import Frame, FrameSplitter, WholeReads

log = structlog.get_logger("headrace.chaos")

_CHUNK: Final = 256 * 1024
_RESET: Final = struct.pack("ii", 1, 0)


class Weather(msgspec.Struct, kw_only=True):
    """What the network does now; all proxies of a world share one."""

    refuses: bool = False
    silent: bool = False
    """Bytes are read and go nowhere."""
    delay_s: float = 0.0
    loses_acks: bool = False
    delivers_twice: bool = False
    delivers_late_s: float = 0.0
    """The most by which a delivery is held back."""


class Proxy:
    """One listener on the loopback, forwarding to one port."""

    def __init__(self, weather: Weather, target_port: int, *, seed: int = 0, frames: bool = True) -> None:
        """Args:
        frames: the server speaks NATS: what is done to single messages can be done.
        """
        self._splitter: Final = FrameSplitter if frames else WholeReads
        self.target_port = target_port
        self.port = 0
        self._weather: Final = weather
        self._chance: Final = random.Random(seed)  # noqa: S311 - spreads delays
        self._writers: Final[set[asyncio.StreamWriter]] = set()
        self._tasks: Final[set[asyncio.Task[None]]] = set()
        self._listener: asyncio.Server | None = None

    async def __aenter__(self) -> Self:
        self._listener = await asyncio.start_server(self._accept, "127.0.0.1", 0, limit=_CHUNK)
        self.port = int(self._listener.sockets[0].getsockname()[1])
        return self

    async def __aexit__(self, *_exc: object) -> None:
        if self._listener is not None:
            self._listener.close()
        self.reset()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def reset(self) -> None:
        """Break every connection at once, without a goodbye."""
        for writer in list(self._writers):
            raw = writer.get_extra_info("socket")
            if raw is not None and not writer.transport.is_closing():
                raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            writer.transport.abort()
        self._writers.clear()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if task is not None:
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        if self._weather.refuses:
            writer.transport.abort()
            return
        try:
            up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self.target_port, limit=_CHUNK)
        except OSError:
            writer.transport.abort()
            return
        self._writers.update((writer, up_writer))
        try:
            await asyncio.gather(self._forward_up(reader, up_writer), self._forward_down(up_reader, writer))
        finally:
            for one in (writer, up_writer):
                self._writers.discard(one)
                one.transport.abort()

    async def _forward_up(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Client to server."""
        splitter = self._splitter()
        while data := await _read(reader):
            frames = splitter.feed(data)
            if self._weather.loses_acks:
                frames = [frame for frame in frames if not frame.is_ack]
            await self._send(writer, frames)
        writer.transport.abort()

    async def _forward_down(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Server to client."""
        splitter = self._splitter()
        while data := await _read(reader):
            now: list[Frame] = []
            for frame in splitter.feed(data):
                held_s = self._chance.random() * self._weather.delivers_late_s if frame.durable else 0.0
                if held_s:
                    self._later(writer, frame, held_s)
                    continue
                now.append(frame)
                if frame.durable and self._weather.delivers_twice:
                    now.append(frame)
            await self._send(writer, now)
        writer.transport.abort()

    def _later(self, writer: asyncio.StreamWriter, frame: Frame, delay_s: float) -> None:
        async def deliver() -> None:
            await asyncio.sleep(delay_s)
            await self._send(writer, [frame])

        task = asyncio.create_task(deliver())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _send(self, writer: asyncio.StreamWriter, frames: list[Frame]) -> None:
        if self._weather.delay_s:
            await asyncio.sleep(self._weather.delay_s)
        if not frames or self._weather.silent or writer.transport.is_closing():
            return
        try:
            writer.write(b"".join(frame.raw for frame in frames))
            await writer.drain()
        except (OSError, RuntimeError) as error:  # RuntimeError: uvloop's word for a transport that was just aborted
            log.debug("a proxied connection ended", error=str(error))


async def _read(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.read(_CHUNK)
    except OSError:
        return b""  # reset, by one of the two or by a fault
