"""Stands between agents and the gateway, and writes down which calls were answered: what the log must then hold.

    agent or Arena ──▶ witness ──▶ gateway
                          └── (session, interaction id) of every answer that reached the caller whole

It must not know the log.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Final

import aiohttp
import msgspec
from aiohttp import web

_HOP_HEADERS: Final = frozenset({"host", "content-length", "transfer-encoding", "connection", "content-encoding"})


class _Answer(msgspec.Struct, frozen=True):
    """What every protocol's answer has."""

    id: str = ""


class Witness:
    """Answered calls so far; open with `open_witness`."""

    def __init__(self) -> None:
        self.answered: Final[set[str]] = set()
        """Interaction ids."""
        self.refused = 0
        """Calls that were not answered with 200, or not at all."""
        self.gateway_url = ""
        self.url = ""


@asynccontextmanager
async def open_witness() -> AsyncGenerator[Witness]:
    """A witness on a free port of the loopback; set its `gateway_url` when the gateway's address is known."""
    witness = Witness()
    timeout = aiohttp.ClientTimeout(total=120.0)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as client:

        async def forward(request: web.Request) -> web.StreamResponse:
            headers = {name: value for name, value in request.headers.items() if name.lower() not in _HOP_HEADERS}
            body = await request.read()
            try:
                url = f"{witness.gateway_url}{request.rel_url}"
                async with client.request(request.method, url, headers=headers, data=body) as answer:
                    data, status, kind = await answer.read(), answer.status, answer.content_type
            except (aiohttp.ClientError, TimeoutError) as error:
                witness.refused += 1
                return web.json_response({"error": {"message": f"{type(error).__name__}"}}, status=502)
            response = web.StreamResponse(
                status=status, headers={"Content-Type": kind, "Content-Length": str(len(data))}
            )
            try:
                await response.prepare(request)
                await response.write(data)
                await response.write_eof()
            except ConnectionError:  # the caller is gone: it saw no answer
                witness.refused += 1
                return response
            if status == 200 and kind == "application/json":
                witness.answered.add(msgspec.json.decode(data, type=_Answer).id)
            witness.refused += status != 200
            return response

        app = web.Application(client_max_size=64 * 1024**2)
        app.router.add_route("*", "/{path:.*}", forward)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.5)
        await runner.setup()
        try:
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            witness.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
            yield witness
        finally:
            await runner.cleanup()
