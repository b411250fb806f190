"""What the chapters share: an empty run on a broker in memory."""

from __future__ import annotations

import pytest

from broker.memory import MemoryBroker, MemoryServer
from pipeline.log import RunLog


@pytest.fixture
def server() -> MemoryServer:
    """A broker's storage. It outlives every connection, like a server on a machine of its own."""
    return MemoryServer()


@pytest.fixture
def broker(server: MemoryServer) -> MemoryBroker:
    """A connection to it, for the run `demo`."""
    return MemoryBroker(server, "demo")


@pytest.fixture
def log(broker: MemoryBroker) -> RunLog:
    """The same run in messages instead of bytes."""
    return RunLog(broker)
