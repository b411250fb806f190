"""A RabbitMQ under chaos: one node of its own, behind a proxy."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

from broker.local_rabbit import LocalRabbit
from broker.settings import ConnectSettings
from ops.chaos.plan import FaultKind
from ops.chaos.proxy import Proxy, Weather

_KINDS: Final = frozenset(
    {
        FaultKind.KILL,
        FaultKind.STOP,
        FaultKind.RESTART,
        FaultKind.SECOND_WORKER,
        FaultKind.BROKER_KILLED,
        FaultKind.BROKER_STOPPED,
        FaultKind.LINK_CUT,
        FaultKind.LINK_REFUSED,
        FaultKind.LINK_DELAYED,
        FaultKind.LINK_HALF_OPEN,
        FaultKind.CLOCK_JUMP,
        FaultKind.WINDOW_PASSED,
    }
)
"""Without those that look into NATS's frames, change a stream's limits, or need several nodes."""


class RabbitNode:
    """Open with `rabbit_node`."""

    def __init__(self, server: LocalRabbit, proxy: Proxy, weather: Weather, shared: Path) -> None:
        self.proxies: Final = (proxy,)
        self.weather: Final = weather
        self.small_disk: Final[Path | None] = None
        self.num_nodes: Final = 1
        self._server: Final = server
        self._shared: Final = shared

    @property
    def direct_url(self) -> str:
        return self._server.url

    def settings(self, name: str) -> ConnectSettings:
        return ConnectSettings(name=name, payload_dir=str(self._shared))

    def overrides(self) -> Sequence[str]:
        url = f"amqp://guest:guest@127.0.0.1:{self.proxies[0].port}/"
        return (f"broker.url={json.dumps(url)}", f"broker.payloads={json.dumps(str(self._shared))}")

    def kinds(self) -> frozenset[FaultKind]:
        return _KINDS

    async def kill(self, *numbers: int) -> None:
        if numbers:
            self._server.kill()

    async def start(self, *numbers: int) -> None:
        if numbers:
            await self._server.start()

    async def restart(self, number: int) -> None:
        await self.kill(number)
        await self.start(number)

    def pause(self, *numbers: int) -> None:
        if numbers:
            self._server.pause()

    def go_on(self, *numbers: int) -> None:
        if numbers:
            self._server.resume()

    def fill_disk(self) -> None:
        raise RuntimeError("there is no small file system to fill")

    def free_disk(self) -> None:
        """None was filled."""


@asynccontextmanager
async def rabbit_node(folder: Path, *, seed: int = 0) -> AsyncGenerator[RabbitNode]:
    """A RabbitMQ of its own and its proxy, as long as the context is open.

    Raises:
        ServerStartError: none is installed.
    """
    weather = Weather()
    server = LocalRabbit(folder / "rabbitmq")
    await server.start()
    try:
        async with Proxy(weather, server.port, seed=seed, frames=False) as proxy:
            yield RabbitNode(server, proxy, weather, folder / "shared")
    finally:
        server.kill()
