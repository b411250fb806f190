from __future__ import annotations

import msgspec
import pytest

from broker.memory import MemoryBroker, MemoryServer
from pipeline.metrics import Metrics
from schemas.messages.sampling import EpisodeRequested, GroupIssued
from schemas.topics import GROUP_ISSUED


@pytest.fixture
def server() -> MemoryServer:
    return MemoryServer()


@pytest.fixture
def broker(server: MemoryServer) -> MemoryBroker:
    return MemoryBroker(server, "demo")


@pytest.fixture
def metrics() -> Metrics:
    return Metrics("demo", "test")


class Log:
    """What tests read from a run's log."""

    def __init__(self, broker: MemoryBroker) -> None:
        self.broker = broker

    async def issue(self, ordinal: int, *, slots: int = 2) -> GroupIssued:
        message = GroupIssued(
            group=f"g{ordinal:07d}", ordinal=ordinal, stream="s", data_id=str(ordinal), num_slots=slots
        )
        await self.broker.publish(GROUP_ISSUED.subject("demo", message), GROUP_ISSUED.encode(message))
        return message

    async def subjects(self, pattern: str = "hr.demo.>") -> list[str]:
        async with self.broker.read([pattern], follow=False) as records:
            return [record.subject async for record in records]

    async def messages(self, topic) -> list[msgspec.Struct]:
        async with self.broker.read([topic.filter("demo")], follow=False) as records:
            return [topic.decode(record.data) async for record in records]


@pytest.fixture
def log(broker: MemoryBroker) -> Log:
    return Log(broker)


def slots_of(issued: GroupIssued) -> list[EpisodeRequested]:
    return [
        EpisodeRequested(group=issued.group, slot=slot, attempt=0, stream=issued.stream, data_id=issued.data_id)
        for slot in range(issued.num_slots)
    ]


@pytest.fixture
def fan():
    return slots_of
