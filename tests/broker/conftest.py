"""One NATS server for all tests of this room, a run of its own for each test."""

from __future__ import annotations

import asyncio
import secrets
from pathlib import Path
from typing import Self

import pytest

from broker.embedded import EmbeddedServer, EmbeddedSettings
from broker.settings import ConnectSettings
from broker.topology import RunLimits

SMALL = RunLimits(log_max_bytes=256 * 2**20, payload_max_bytes=512 * 2**20, state_max_bytes=16 * 2**20)


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory):
    """A server that no test stops."""
    server = EmbeddedServer(tmp_path_factory.mktemp("nats"), EmbeddedSettings())
    asyncio.run(server.start())
    yield server
    asyncio.run(server.stop())


@pytest.fixture
def run() -> str:
    return f"t{secrets.token_hex(4)}"


@pytest.fixture
async def own_server(tmp_path: Path):
    """A server that a test may kill."""
    server = EmbeddedServer(tmp_path / "nats")
    await server.start()
    yield server
    await server.stop()


@pytest.fixture
def patience(server: EmbeddedServer) -> ConnectSettings:
    return server.connect_settings()


class FaultyProxy:
    """Stands between a client and a server; on demand swallows what the server says and then cuts the line."""

    def __init__(self, target_port: int) -> None:
        self._target_port = target_port
        self._swallow = False
        self._writers: list[asyncio.StreamWriter] = []
        self._listener: asyncio.Server | None = None
        self.swallowed = asyncio.Event()
        self.port = 0

    async def __aenter__(self) -> Self:
        self._listener = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._listener.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_exc: object) -> None:
        assert self._listener is not None
        self._listener.close()
        self.cut()

    def lose_the_next_answer(self) -> None:
        """Whatever the server says next never arrives, and the line breaks."""
        self._swallow = True
        self.swallowed.clear()

    def cut(self) -> None:
        """Break all lines."""
        for writer in self._writers:
            writer.close()
        self._writers.clear()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self._target_port)
        self._writers += [writer, up_writer]
        await asyncio.gather(self._pump(reader, up_writer, answers=False), self._pump(up_reader, writer, answers=True))

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, answers: bool) -> None:
        try:
            while data := await reader.read(65536):
                if answers and self._swallow and b"PONG" not in data:
                    self._swallow = False
                    self.swallowed.set()
                    self.cut()
                    return
                writer.write(data)
                await writer.drain()
        except ConnectionError:
            pass  # cut on purpose
        finally:
            writer.close()


@pytest.fixture
async def proxy(server: EmbeddedServer):
    async with FaultyProxy(int(server.url.rpartition(":")[2])) as proxy:
        yield proxy
