"""Asks the servers that a config names whether they answer: brokers by their greeting, engines and Arenas over HTTP."""

from __future__ import annotations

import re
import struct
from typing import Final
from urllib.parse import urlsplit

import anyio
import anyio.abc
import httpx
import msgspec
from anyio.streams.buffered import BufferedByteReceiveStream

from ops.arena_access import LOCAL
from ops.config import RunConfig
from ops.doctor.facts import ServerFacts

_DEADLINE_S: Final = 5.0
_GREETING_BYTES: Final = 64 * 1024
_NATS_PORT: Final = 4222
_RABBITMQ_PORTS: Final = {"amqp": 5672, "amqps": 5671}
_AMQP_HEADER: Final = b"AMQP\x00\x00\x09\x01"
_FRAME_HEAD: Final = struct.Struct(">BHI")
"""Type, channel, size."""
_CONNECTION_START: Final = b"\x00\x0a\x00\x0a"
_VERSION: Final = re.compile(rb"\x07versionS\x00{3}.([0-9][\w.+-]*)")
"""The field of the server's properties: its name, `S`, the text's length, the text."""


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
    """Read a server's greeting: a NATS server sends it before any login, a RabbitMQ in answer to the protocol's header."""
    parts = urlsplit(url if "://" in url else f"nats://{url}")
    port = parts.port or _RABBITMQ_PORTS.get(parts.scheme, _NATS_PORT)
    shown = f"{parts.scheme}://{parts.hostname or ''}:{port}"
    try:
        with anyio.fail_after(_DEADLINE_S):
            async with await anyio.connect_tcp(parts.hostname or "", port) as stream:
                if parts.scheme == "amqps":  # how it greets is told to those that it trusts
                    return ServerFacts(key=key, url=shown)
                if parts.scheme == "amqp":
                    return _rabbitmq(key, shown, await _rabbitmq_greeting(stream))
                data = b""
                while b"\n" not in data and len(data) < _GREETING_BYTES:
                    data += await stream.receive()
        greeting = msgspec.json.decode(data.partition(b"\n")[0].removeprefix(b"INFO "), type=_Greeting)
    except (anyio.EndOfStream, anyio.IncompleteRead, anyio.BrokenResourceError):
        return ServerFacts(key=key, url=shown, error="it ended the connection before it said what it is")
    except (OSError, TimeoutError) as error:
        return ServerFacts(key=key, url=shown, error=str(error) or f"no answer within {_DEADLINE_S:.0f} s")
    except msgspec.DecodeError:
        return ServerFacts(key=key, url=shown, error="expected a NATS server, and what listens there is none")
    if not greeting.jetstream:
        return ServerFacts(key=key, url=shown, error="it has no JetStream: start it with -js")
    return ServerFacts(key=key, url=shown, version=greeting.version)


async def _rabbitmq_greeting(stream: anyio.abc.ByteStream) -> bytes:
    """What AMQP 0-9-1's connection.start holds; the bytes as they are where what answers is another server."""
    await stream.send(_AMQP_HEADER)
    received = BufferedByteReceiveStream(stream)
    head = await received.receive_exactly(_FRAME_HEAD.size)
    kind, channel, size_bytes = _FRAME_HEAD.unpack(head)
    if (kind, channel) != (1, 0) or size_bytes > _GREETING_BYTES:
        return head
    return await received.receive_exactly(size_bytes)


def _rabbitmq(key: str, shown: str, greeting: bytes) -> ServerFacts:
    if not greeting.startswith(_CONNECTION_START) or b"RabbitMQ" not in greeting:
        return ServerFacts(key=key, url=shown, error="expected a RabbitMQ, and what listens there is none")
    version = _VERSION.search(greeting)
    return ServerFacts(key=key, url=shown, version=version[1].decode() if version else "")


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
