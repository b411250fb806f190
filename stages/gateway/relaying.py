"""Another gateway's answer, passed on as it comes. Knows nothing of sessions."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from typing import Final

import structlog

from stages.gateway.errors import UnavailableError
from stages.gateway.reading import Send
from stages.ports import ForwardedAnswer

log = structlog.get_logger("headrace.gateway")

HOP_HEADERS: Final = frozenset({"host", "connection", "content-length", "transfer-encoding", "accept-encoding"})
"""Of one connection, not of what goes over it."""


async def relay(passed_on: Awaitable[ForwardedAnswer], address: str, send: Send) -> None:
    """Another gateway's answer, as it comes. One that breaks off after its beginning breaks the client's connection off, too.

    Raises:
        UnavailableError: the other gateway can't be reached.
    """
    try:
        answer = await passed_on
    except ConnectionError as error:
        raise UnavailableError(f"the session's gateway can't be reached: {error}", retry_after_s=1) from error
    shown = [
        (name.encode("latin-1"), value.encode("latin-1"))
        for name, value in answer.headers
        if name.lower() not in HOP_HEADERS
    ]
    async with _closing(answer.body) as parts:
        await send({"type": "http.response.start", "status": answer.status, "headers": shown})
        try:
            async for part in parts:
                await send({"type": "http.response.body", "body": part, "more_body": True})
        except ConnectionError as error:
            log.warning("the session's gateway broke its answer off", gateway=address, error=str(error))
            return  # without its end: the server closes the connection, and no client takes the part for the whole
    await send({"type": "http.response.body", "body": b"", "more_body": False})


@asynccontextmanager
async def _closing(parts: AsyncIterator[bytes]) -> AsyncGenerator[AsyncIterator[bytes]]:
    """A generator is closed with the context, not when it is collected: that ends the connection it reads from."""
    try:
        yield parts
    finally:
        if isinstance(parts, AsyncGenerator):
            await parts.aclose()
