"""Runs a whole local Arena: harness pool, control plane and model gateway on one loopback socket."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import AsyncGenerator, Callable, Generator

import aiohttp
import anyio
import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.routing import Mount
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from ops.arena.app import ControlPlane
from ops.arena.config import ArenaConfigError, ArenaServerConfig, checked, secret_from_env
from ops.arena.episodes import EpisodeRunner
from ops.arena.model_gateway import ModelGateway
from ops.arena.pool import HarnessPool
from ops.arena.state import ArenaState

_STOP_S = 5.0
"""How long open requests may take when the server stops."""
_TICK_S = 0.1
"""What uvicorn's housekeeping expects."""
_KEEP_ALIVE_S = 75
"""Longer than clients keep idle connections, so that they, not we, close them."""


class ArenaSecrets(msgspec.Struct, frozen=True, kw_only=True):
    """What callers must show. Kept out of the config, which is written to files."""

    openapi_token: str
    llm_api_key: str

    def __repr__(self) -> str:
        return "ArenaSecrets(…)"


class _Protocol(HttpToolsProtocol):
    """Lets a handler drop its connection: a lost answer is a fault that HTTP itself can't express."""

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["state"]["abort_connection"] = self.transport.abort  # pyright: ignore[reportTypedDictNotRequiredAccess] - uvicorn always sets it


class _Server(uvicorn.Server):
    """Leaves signals to whoever runs it, and stops at once when told."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._told = anyio.Event()

    def stop(self) -> None:
        """End the server; open connections are dropped."""
        self.should_exit = True
        self.force_exit = True
        self._told.set()

    async def main_loop(self) -> None:
        ticks = 0
        while not await self.on_tick(ticks):
            ticks += 1
            with anyio.move_on_after(_TICK_S):
                await self._told.wait()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        yield


async def serve(
    config: ArenaServerConfig, *, ready: Callable[[str], None], secrets: ArenaSecrets | None = None
) -> None:
    """Serve until cancelled; `ready` gets the base URL once calls are answered.

    Args:
        config: What to serve.
        ready: Called once, with a URL such as http://127.0.0.1:40123.
        secrets: What callers must show; None reads the environment variables that the config names.

    Raises:
        ArenaConfigError: A setting can't be used; nothing was started.
        PoolError: The harness processes can't be started; inside an exception group.
    """
    config = checked(config)
    if secrets is None:
        token, key = secret_from_env(config.openapi_token_env), secret_from_env(config.llm_api_key_env)
        secrets = ArenaSecrets(openapi_token=token, llm_api_key=key)
    state = ArenaState(config)
    with _bound(config) as listener:
        timeout = aiohttp.ClientTimeout(total=config.model_timeout_s, sock_connect=10)
        connector = aiohttp.TCPConnector(limit=0)
        async with (
            aiohttp.ClientSession(connector=connector, timeout=timeout, trust_env=False) as http,
            anyio.create_task_group() as group,
        ):
            pool = HarnessPool(config.pool_processes)
            group.start_soon(pool.run)
            runner = EpisodeRunner(state, pool)
            control = ControlPlane(state, runner, group, token=secrets.openapi_token)
            gateway = ModelGateway(state, http, llm_api_key=secrets.llm_api_key)
            routes = [Mount("/openapi/v1", routes=control.routes()), Mount("/api", routes=gateway.routes())]
            async with _listening(Starlette(routes=routes), listener):
                host, port = listener.getsockname()[:2]
                ready(f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}")
                await anyio.sleep_forever()


@contextlib.contextmanager
def _bound(config: ArenaServerConfig) -> Generator[socket.socket]:
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((config.host, config.port))
        except OSError as error:
            text = f"port: can't listen on {config.host}:{config.port} ({error.strerror}); 0 lets the system choose"
            raise ArenaConfigError(text) from error
        yield listener


@contextlib.asynccontextmanager
async def _listening(app: Starlette, listener: socket.socket) -> AsyncGenerator[None]:
    settings = uvicorn.Config(
        app,
        http=_Protocol,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=int(_STOP_S),
        backlog=4096,
    )
    server = _Server(settings)
    async with anyio.create_task_group() as group:

        async def run() -> None:
            with anyio.CancelScope(shield=True):
                await server.serve(sockets=[listener])

        group.start_soon(run)
        try:
            with anyio.fail_after(_STOP_S):
                while not server.started:
                    await anyio.sleep(0.005)
            yield
        finally:
            server.stop()
