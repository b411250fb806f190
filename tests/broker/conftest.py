"""One NATS server for all tests of this room, a run of its own for each test."""

from __future__ import annotations

import asyncio
import secrets
from pathlib import Path

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
