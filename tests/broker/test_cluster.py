"""Three servers with replicated streams, of which one after the other dies and comes back. Long: every night."""

from __future__ import annotations

import json
import socket
import subprocess
from contextlib import AsyncExitStack
from pathlib import Path

import anyio
import pytest

from broker.api import ConsumerSettings
from broker.conformance.asserting import wait_until
from broker.connect import connect, open_admin
from broker.embedded import find_binary
from broker.errors import BrokerError, PayloadMissingError
from broker.topology import RunLimits
from schemas.payload import PayloadRef

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


async def until_led(cluster: Cluster) -> None:
    """Until the nodes have a leader that answers."""

    async def ready() -> bool:
        try:
            async with open_admin(cluster.url) as admin:
                await admin.runs()
        except BrokerError:
            return False
        return True

    await wait_until(ready, "a leader")


async def test_one_of_three_nodes_dies_and_returns_10_times_and_nothing_is_lost(cluster, run):
    await until_led(cluster)
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


async def test_what_is_confirmed_is_read_at_once_from_every_node(cluster, run):
    """A majority confirms, so one replica may lag: it must not be taken for the whole store."""
    await until_led(cluster)
    async with AsyncExitStack() as stack:
        brokers = [
            await stack.enter_async_context(connect(url, run, create=True, limits=LIMITS))
            for url in cluster.url.split(",")
        ]

        async def put_and_get(worker: int) -> None:
            for number in range(300):
                data = f"{worker}-{number}".encode()
                ref = await brokers[worker % 3].payloads.put(data)
                assert bytes(await brokers[(worker + number) % 3].payloads.get(ref)) == data
                subject = f"hr.{run}.a.b.{worker}-{number}"
                await brokers[worker % 3].publish(subject, data)
                assert await brokers[(worker + number) % 3].get(subject) is not None

        async with anyio.create_task_group() as tasks:
            for worker in range(6):
                tasks.start_soon(put_and_get, worker)
        with pytest.raises(PayloadMissingError):
            await brokers[0].payloads.get(PayloadRef(store="run", id="0" * 32, size_bytes=1))
        assert await brokers[0].get(f"hr.{run}.a.b.never") is None
