"""A server of a test's own; and lets the tests of this folder import what lies beside them."""

from __future__ import annotations

import sys
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest

from broker.api import Broker
from broker.connect import connect
from broker.embedded import EmbeddedServer
from broker.topology import RunLimits

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
async def server(tmp_path: Path) -> AsyncGenerator[EmbeddedServer]:
    server = EmbeddedServer(tmp_path / "nats")
    await server.start()
    yield server
    await server.stop()


@pytest.fixture
def opened(server: EmbeddedServer) -> Callable[[RunLimits], AbstractAsyncContextManager[Broker]]:
    """Opens run `r` with these limits."""
    return lambda limits: connect(server.url, "r", server.connect_settings(), create=True, limits=limits)
