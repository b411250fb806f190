"""The broker of a chaos run: one node or three with replicated streams, each behind a proxy that all workers go through.

workers ──▶ proxy per node ──▶ nats-server ──▶ store (on a small file system of its own where that may be mounted)
             chaos itself ─────────▲   looks past the proxies
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
from collections.abc import AsyncGenerator, Generator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Final, Protocol

import anyio
import structlog

from broker.connect import open_admin
from broker.embedded import EmbeddedServer, EmbeddedSettings, write_private
from broker.errors import BrokerError
from broker.settings import ConnectSettings
from ops.chaos.plan import ON_NODES, FaultKind
from ops.chaos.proxy import Proxy, Weather

log = structlog.get_logger("headrace.chaos")

STORE_BYTES: Final = 512 * 1024**2
"""Of the small file system."""
_READY_S: Final = 60.0


class BrokerUnderChaos(Protocol):
    """The broker of a chaos run, whatever it is."""

    proxies: Final[Sequence[Proxy]]
    weather: Final[Weather]
    small_disk: Final[Path | None]
    """The first node's store, where it is a file system of its own."""
    num_nodes: Final[int]

    @property
    def direct_url(self) -> str:
        """Past the proxies."""
        ...

    def settings(self, name: str) -> ConnectSettings:
        """For a connection of chaos itself."""
        ...

    def overrides(self) -> Sequence[str]:
        """Where the run finds it, as settings of its config."""
        ...

    def kinds(self) -> frozenset[FaultKind]:
        """The faults that can be played on it."""
        ...

    async def kill(self, *numbers: int) -> None:
        """Kill -9 of these nodes, at the same time."""
        ...

    async def start(self, *numbers: int) -> None:
        """Start these nodes again."""
        ...

    async def restart(self, number: int) -> None:
        """SIGTERM, and a start."""
        ...

    def pause(self, *numbers: int) -> None:
        """SIGSTOP."""
        ...

    def go_on(self, *numbers: int) -> None:
        """SIGCONT."""
        ...

    def fill_disk(self) -> None:
        """Leave no byte on the small file system."""
        ...

    def free_disk(self) -> None:
        """Give the room back."""
        ...


class BrokerNodes:
    """NATS nodes; open with `broker_nodes`."""

    def __init__(
        self, nodes: list[EmbeddedServer], proxies: list[Proxy], weather: Weather, small_disk: Path | None
    ) -> None:
        self.nodes: Final = nodes
        self.num_nodes: Final = len(nodes)
        self.proxies: Final = proxies
        self.weather: Final = weather
        self.small_disk: Final = small_disk
        """The first node's store, where it is a file system of its own."""

    @property
    def token_file(self) -> Path:
        """The token of every node."""
        return self.nodes[0].token_file

    @property
    def url(self) -> str:
        """Where the workers go: through the proxies."""
        return ",".join(f"nats://127.0.0.1:{proxy.port}" for proxy in self.proxies)

    @property
    def direct_url(self) -> str:
        """Past the proxies."""
        return ",".join(node.url for node in self.nodes)

    def settings(self, name: str) -> ConnectSettings:
        """For a connection of chaos itself."""
        return ConnectSettings(name=name, token_file=str(self.token_file))

    def overrides(self) -> Sequence[str]:
        return (
            f"broker.url={json.dumps(self.url)}",
            f"broker.token_file={json.dumps(str(self.token_file))}",
            f"broker.replicas={self.num_nodes}",
        )

    def kinds(self) -> frozenset[FaultKind]:
        kinds = frozenset(FaultKind)
        if self.num_nodes == 1:
            kinds -= ON_NODES
        return kinds if self.small_disk else kinds - {FaultKind.DISK_FULL}

    async def kill(self, *numbers: int) -> None:
        for number in numbers:
            if self.nodes[number].pid:
                os.kill(self.nodes[number].pid, signal.SIGKILL)
        for number in numbers:
            await self.nodes[number].kill()

    async def start(self, *numbers: int) -> None:
        for number in numbers:
            await self.nodes[number].start()

    async def restart(self, number: int) -> None:
        """Stop a node in good order and start it again."""
        await self.nodes[number].restart()

    def pause(self, *numbers: int) -> None:
        """SIGSTOP."""
        self._signal(signal.SIGSTOP, numbers)

    def go_on(self, *numbers: int) -> None:
        """SIGCONT."""
        self._signal(signal.SIGCONT, numbers)

    def _signal(self, number: signal.Signals, nodes: tuple[int, ...]) -> None:
        for node in nodes:
            if self.nodes[node].pid:
                os.kill(self.nodes[node].pid, number)

    async def wait_ready(self) -> None:
        """Return when JetStream answers.

        Raises:
            TimeoutError: it does not.
        """
        with anyio.fail_after(_READY_S):
            while True:
                try:
                    async with open_admin(self.direct_url, self.settings("chaos")) as admin:
                        await admin.runs()
                except BrokerError:
                    await anyio.sleep(0.1)
                else:
                    return

    def fill_disk(self) -> None:
        """Leave no byte on the small file system.

        Raises:
            RuntimeError: there is none.
        """
        if self.small_disk is None:
            raise RuntimeError("there is no small file system to fill")
        descriptor = os.open(self.small_disk / "filler", os.O_WRONLY | os.O_CREAT, 0o600)
        try:
            size = 0
            for step in (1024**2, 4096, 1):
                try:
                    while True:
                        size += os.pwrite(descriptor, b"\0" * step, size)
                except OSError:
                    continue
        finally:
            os.close(descriptor)

    def free_disk(self) -> None:
        """Give the room back."""
        if self.small_disk is not None:
            (self.small_disk / "filler").unlink(missing_ok=True)


@asynccontextmanager
async def broker_nodes(folder: Path, num_nodes: int, *, seed: int = 0) -> AsyncGenerator[BrokerNodes]:
    """One node, or three of a cluster, and their proxies, as long as the context is open."""
    weather = Weather()
    token = secrets.token_urlsafe(32)
    ports, routes = _free_ports(num_nodes), _free_ports(num_nodes)
    async with AsyncExitStack() as stack:
        first = folder / "node0"
        small = stack.enter_context(_small_disk(first))
        nodes: list[EmbeddedServer] = []
        for number in range(num_nodes):
            store = folder / f"node{number}"
            store.mkdir(parents=True, exist_ok=True)
            write_private(store / "token", token)
            clustered = num_nodes > 1
            settings = EmbeddedSettings(
                port=ports[number],
                server_name=f"node{number}",
                route_port=routes[number] if clustered else 0,
                routes=tuple(f"nats://127.0.0.1:{port}" for port in routes) if clustered else (),
            )
            nodes.append(EmbeddedServer(store, settings))
        proxies = [
            await stack.enter_async_context(Proxy(weather, port, seed=seed + number))
            for number, port in enumerate(ports)
        ]
        found = BrokerNodes(nodes, proxies, weather, first if small else None)
        try:
            await found.start(*range(num_nodes))
            await found.wait_ready()
            yield found
        finally:
            found.go_on(*range(num_nodes))
            with anyio.CancelScope(shield=True):
                for node in nodes:
                    await node.stop()


@contextmanager
def _small_disk(path: Path) -> Generator[bool]:
    """Mount a small file system at `path` where this process may; whether it did."""
    path.mkdir(parents=True, exist_ok=True)
    mount, umount = shutil.which("mount"), shutil.which("umount")
    if mount is None or umount is None or os.geteuid() != 0:
        yield False
        return
    options = ["-t", "tmpfs", "-o", f"size={STORE_BYTES},mode=0700", "headrace-chaos", str(path)]
    done = subprocess.run([mount, *options], check=False, capture_output=True, text=True)  # noqa: S603 - fixed arguments
    if done.returncode:
        log.info("no small file system can be mounted", error=done.stderr.strip())
        yield False
        return
    try:
        yield True
    finally:
        subprocess.run([umount, "-l", str(path)], check=False, capture_output=True)  # noqa: S603 - same


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [int(sock.getsockname()[1]) for sock in sockets]
    for sock in sockets:
        sock.close()
    return ports
