"""The broker of a run, as a node sees it: somebody else's, or a NATS server of this node that is started again whenever it dies."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import anyio
import anyio.abc
import msgspec
import structlog

from broker.embedded import EmbeddedServer, write_private
from broker.settings import ConnectSettings
from ops.connection import broker_login
from ops.run_folder import RunFolder
from ops.running.site import Site
from ops.secrets import RunSecrets

log = structlog.get_logger("headrace.run")


@asynccontextmanager
async def run_broker(
    site: Site, folder: RunFolder, secrets: RunSecrets, tasks: anyio.abc.TaskGroup
) -> AsyncGenerator[tuple[str, ConnectSettings]]:
    """Its URL, and how to log in there.

    Raises:
        ServerStartError: this node's server does not start.
    """
    login = broker_login(site.config.broker, folder)
    if site.servers_share_token:
        token_file = folder.path / "broker.token"
        write_private(token_file, secrets.broker_token)
        login = msgspec.structs.replace(login, token_file=str(token_file))
    if site.server is None:
        yield site.config.broker.url, login
        return
    server = EmbeddedServer(folder.nats, site.server)
    if site.servers_share_token:
        folder.nats.mkdir(parents=True, exist_ok=True)
        write_private(server.token_file, secrets.broker_token)
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
        if site.servers_share_token:
            yield site.config.broker.url, login  # any server of the cluster will do
        else:
            yield server.url, server.connect_settings(login)
    finally:
        scope.cancel()
        await server.stop()
