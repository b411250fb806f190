from __future__ import annotations

import anyio
import httpx

from broker.memory import MemoryBroker, MemoryServer
from ops.gateway_peers import SILENT_S, LivePeers
from pipeline.metrics import Metrics, WorkerReport
from stages.clients.forwarding import HttpForwarder


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def report(name: str, url: str) -> WorkerReport:
    metrics = Metrics("demo", "gateway")
    metrics.labels.update(gateway=name, url=url)
    return metrics.report()


async def test_a_gateway_is_alive_as_long_as_it_is_heard() -> None:
    clock = Clock()
    async with httpx.AsyncClient() as http, anyio.create_task_group() as tasks:
        peers = LivePeers(MemoryBroker(MemoryServer(), "demo"), HttpForwarder(http), now=clock, first_s=0.0)
        tasks.start_soon(peers.listen)
        assert await peers.address("gw-1") is None
        peers.hear(report("gw-1", "http://127.0.0.1:1"))
        assert await peers.address("gw-1") == "http://127.0.0.1:1"
        clock.now_s += SILENT_S + 0.1
        assert await peers.address("gw-1") is None
        peers.hear(report("gw-2", "http://127.0.0.1:2"))
        assert await peers.address("gw-2") == "http://127.0.0.1:2"
        tasks.cancel_scope.cancel()


async def test_a_gateway_that_just_began_to_listen_does_not_take_others_for_dead() -> None:
    broker = MemoryBroker(MemoryServer(), "demo")
    asked = anyio.Event()
    found: list[str | None] = []
    async with httpx.AsyncClient() as http, anyio.create_task_group() as tasks:
        peers = LivePeers(broker, HttpForwarder(http), first_s=0.05)

        async def ask() -> None:
            asked.set()
            found.append(await peers.address("gw-1"))
            tasks.cancel_scope.cancel()

        tasks.start_soon(peers.listen)
        tasks.start_soon(ask)
        await asked.wait()
        peers.hear(report("gw-1", "http://127.0.0.1:1"))
    assert found == ["http://127.0.0.1:1"]


async def test_a_worker_that_is_no_gateway_is_not_one() -> None:
    async with httpx.AsyncClient() as http, anyio.create_task_group() as tasks:
        peers = LivePeers(MemoryBroker(MemoryServer(), "demo"), HttpForwarder(http), now=Clock(), first_s=0.0)
        tasks.start_soon(peers.listen)
        peers.hear(Metrics("demo", "gateway").report())
        assert await peers.address("") is None
        tasks.cancel_scope.cancel()
