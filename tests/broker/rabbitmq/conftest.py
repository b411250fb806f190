"""A real RabbitMQ for the whole session, and a run of its own for each test."""

from __future__ import annotations

import itertools
import os
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest

from broker.connect import connect
from broker.local_rabbit import LocalRabbit
from broker.settings import ConnectSettings

_RUNS = itertools.count()


@pytest.fixture(scope="session")
def rabbit(tmp_path_factory):
    server = LocalRabbit(Path(tmp_path_factory.mktemp("rabbit")))
    anyio.run(server.start)
    yield server
    server.kill()


@pytest.fixture
def rabbit_run():
    return f"run{os.getpid()}-{next(_RUNS)}"


@pytest.fixture
def make(rabbit, rabbit_run, tmp_path, monkeypatch):
    """Opens one more connection to the run of this test."""
    monkeypatch.setattr("broker.rabbitmq.queues.SETTLE_S", 0.0)  # nobody kills this server
    settings = ConnectSettings(payload_dir=str(tmp_path / "shared"))

    @asynccontextmanager
    async def opened():
        async with connect(rabbit.url, rabbit_run, settings, create=True) as broker:
            yield broker

    return opened
