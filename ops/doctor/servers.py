"""Asks the servers that a config names whether they answer: brokers by their greeting, engines and Arenas over HTTP."""

from __future__ import annotations

from typing import Final
from urllib.parse import urlsplit

import anyio
import httpx
import msgspec

from ops.arena_access import LOCAL
from ops.config import RunConfig
from ops.doctor.facts import ServerFacts

_DEADLINE_S: Final = 5.0
_GREETING_BYTES: Final = 64 * 1024
_NATS_PORT: Final = 4222


class _Greeting(msgspec.Struct, frozen=True, kw_only=True):
    version: str = ""
    jetstream: bool = False


async def probe_servers(config: RunConfig) -> list[ServerFacts]:
    """All of them at once, each with a deadline."""
    found: list[ServerFacts] = []
    async with anyio.create_task_group() as tasks:

        async def ask_broker(url: str) -> None:
            found.append(await probe_broker("broker.url", url))

        async def ask_http(key: str, url: str, path: str) -> None:
            found.append(await probe_http(key, url, path))

        if config.broker.url != "embedded":
            for url in config.broker.url.split(","):
                tasks.start_soon(ask_broker, url.strip())
        for url in config.engine.urls:
            tasks.start_soon(ask_http, "engine.urls", url, "/health")
        if config.arena.url != LOCAL:
            tasks.start_soon(ask_http, "arena.url", config.arena.url, "")
    return sorted(found, key=lambda server: (server.key, server.url))


async def probe_broker(key: str, url: str) -> ServerFacts:
    """Read a NATS server's greeting, which it sends before any login."""
    parts = urlsplit(url if "://" in url else f"nats://{url}")
    host, port = parts.hostname or "", parts.port or _NATS_PORT
    shown = f"nats://{host}:{port}"
    try:
        with anyio.fail_after(_DEADLINE_S):
            async with await anyio.connect_tcp(host, port) as stream:
                data = b""
                while b"\n" not in data and len(data) < _GREETING_BYTES:
                    data += await stream.receive()
        greeting = msgspec.json.decode(data.partition(b"\n")[0].removeprefix(b"INFO "), type=_Greeting)
    except (OSError, TimeoutError, anyio.EndOfStream) as error:
        return ServerFacts(key=key, url=shown, error=str(error) or f"no answer within {_DEADLINE_S:.0f} s")
    except msgspec.DecodeError:
        return ServerFacts(key=key, url=shown, error="expected a NATS server, and what listens there is none")
    if not greeting.jetstream:
        return ServerFacts(key=key, url=shown, error="it has no JetStream: start it with -js")
    return ServerFacts(key=key, url=shown, version=greeting.version)


async def probe_http(key: str, url: str, path: str) -> ServerFacts:
    """Whether something answers at an address; a path that is meant for it must answer without an error."""
    parts = urlsplit(url)
    shown = f"{parts.scheme}://{parts.hostname}{f':{parts.port}' if parts.port else ''}{parts.path}"
    try:
        async with httpx.AsyncClient(timeout=_DEADLINE_S) as client:
            answer = await client.get(url.rstrip("/").removesuffix("/v1") + path if path else url)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        return ServerFacts(key=key, url=shown, error=str(error) or type(error).__name__)
    if path and answer.is_error:
        return ServerFacts(key=key, url=shown, error=f"{path} answers {answer.status_code}")
    return ServerFacts(key=key, url=shown)
