"""Three servers with replicated streams, of which one after the other dies and comes back. Long: every night."""

from __future__ import annotations

import json
import socket
import subprocess
from pathlib import Path

import anyio
import pytest

from broker.api import ConsumerSettings
from broker.conformance.asserting import wait_until
from broker.connect import connect, open_admin
from broker.embedded import find_binary
from broker.errors import BrokerError
from broker.topology import RunLimits

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(300)]
LIMITS = RunLimits(replicas=3, log_max_bytes=2**28, payload_max_bytes=2**28, state_max_bytes=2**24)


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [sock.getsockname()[1] for sock in sockets]
    for sock in sockets:
        sock.close()
    return ports


class Cluster:
    """Three nodes on the loopback."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._clients = free_ports(3)
        self._routes = free_ports(3)
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self.url = ",".join(f"nats://127.0.0.1:{port}" for port in self._clients)

    def start(self, node: int) -> None:
        folder = self._folder / str(node)
        folder.mkdir(exist_ok=True)
        routes = ", ".join(f"nats://127.0.0.1:{port}" for port in self._routes)
        (folder / "c.conf").write_text(
            f'listen: "127.0.0.1:{self._clients[node]}"\nserver_name: n{node}\nmax_payload: 8MB\n'
            f"jetstream {{ store_dir: {json.dumps(str(folder))} }}\n"
            f'cluster {{ name: c, listen: "127.0.0.1:{self._routes[node]}", routes: [{routes}] }}\n'
        )
        self._processes[node] = subprocess.Popen([find_binary(), "-c", folder / "c.conf", "-l", folder / "log"])

    def kill(self, node: int) -> None:
        process = self._processes.pop(node)
        process.kill()
        process.wait()

    def stop(self) -> None:
        for node in list(self._processes):
            self.kill(node)


@pytest.fixture
async def cluster(tmp_path):
    cluster = Cluster(tmp_path)
    for node in range(3):
        cluster.start(node)
    yield cluster
    cluster.stop()


async def test_one_of_three_nodes_dies_and_returns_10_times_and_nothing_is_lost(cluster, run):
    async def ready() -> bool:
        try:
            async with open_admin(cluster.url) as admin:
                await admin.runs()
        except BrokerError:
            return False
        return True

    await wait_until(ready, "a leader")
    seen: set[int] = set()
    read: list[int] = []
    stop = anyio.Event()
    async with connect(cluster.url, run, create=True, limits=LIMITS) as broker, anyio.create_task_group() as tasks:

        async def publish() -> None:
            number = 0
            while not stop.is_set():
                await broker.publish(f"hr.{run}.in.x.{number}", b"x")
                number += 1

        async def work() -> None:
            settings = ConsumerSettings(ack_wait_s=5)
            async with broker.consume("d", [f"hr.{run}.in.x.>"], settings) as deliveries:
                async for delivery in deliveries:
                    await broker.publish(delivery.subject.replace(".in.", ".out."), delivery.data)
                    await delivery.ack()
                    seen.add(delivery.sequence)

        async def follow() -> None:
            async with broker.read([f"hr.{run}.in.x.>"]) as records:
                async for record in records:
                    read.append(record.sequence)  # noqa: PERF401 - watched while it grows

        for task in (publish, work, follow):
            tasks.start_soon(task)
        for round_ in range(10):
            node, before = round_ % 3, len(seen)
            cluster.kill(node)

            async def moves(before: int = before) -> bool:
                return len(seen) > before + 20

            await wait_until(moves, f"work goes on without node {node}")
            cluster.start(node)
            before = len(seen)
            await wait_until(moves, f"work goes on with node {node} again")
        stop.set()

        async def all_done() -> bool:
            last = (await broker.log_status()).last_sequence
            return len(seen) * 2 == last and len(read) == len(seen)

        await wait_until(all_done, "every message handled, every result stored once")
        assert read == sorted(set(read))
        tasks.cancel_scope.cancel()
