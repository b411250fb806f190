"""The broker of a run on this machine: the configured one, or an embedded NATS server that is started again whenever it dies."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import anyio
import anyio.abc
import structlog

from broker.embedded import EmbeddedServer, EmbeddedSettings
from broker.settings import ConnectSettings
from ops.config import RunConfig
from ops.connection import broker_login
from ops.run_folder import RunFolder

log = structlog.get_logger("headrace.run")


@asynccontextmanager
async def run_broker(
    config: RunConfig, folder: RunFolder, tasks: anyio.abc.TaskGroup
) -> AsyncGenerator[tuple[str, ConnectSettings]]:
    """Its URL, and how to log in there.

    Raises:
        ServerStartError: the embedded server does not start.
    """
    login = broker_login(config.broker, folder)
    if config.broker.url != "embedded":
        yield config.broker.url, login
        return
    server = EmbeddedServer(
        folder.nats,
        EmbeddedSettings(
            binary=config.broker.server_binary,
            port=config.broker.server_port,
            sync_interval="always" if config.broker.sync_always else "2m",
        ),
    )
    await server.start()
    scope = anyio.CancelScope()

    async def watch() -> None:
        with scope:
            while True:
                await anyio.sleep(0.1)
                if server.returncode is not None:
                    log.warning("the NATS server died and is started again", exit=server.returncode)
                    await server.start()

    tasks.start_soon(watch)
    try:
        yield server.url, server.connect_settings(login)
    finally:
        scope.cancel()
        await server.stop()
