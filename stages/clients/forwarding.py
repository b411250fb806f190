"""Passes a request on to another gateway of the run, and its answer back as it comes. Knows nothing of sessions."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping

import httpx

from stages.ports import ForwardedAnswer


class HttpForwarder:
    """Forwards over one pooled client, which whoever makes it closes."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self._client = client

    async def forward(self, base_url: str, target: str, headers: Mapping[str, str], body: bytes) -> ForwardedAnswer:
        """POST `body` to a target (path and query) of another gateway.

        Raises:
            ConnectionError: it could not be reached.
        """
        request = self._client.build_request("POST", f"{base_url}{target}", headers=dict(headers), content=body)
        try:
            response = await self._client.send(request, stream=True)
        except httpx.TransportError as error:
            raise ConnectionError(f"{base_url} did not answer: {type(error).__name__}") from error
        return ForwardedAnswer(
            status=response.status_code, headers=list(response.headers.items()), body=_parts(response, base_url)
        )


async def _parts(response: httpx.Response, base_url: str) -> AsyncIterator[bytes]:
    try:
        async for part in response.aiter_raw():
            yield part
    except httpx.TransportError as error:
        raise ConnectionError(f"{base_url} broke its answer off: {type(error).__name__}") from error
    finally:
        await response.aclose()


def forwarding_client(
    *, connect_s: float = 5.0, silence_s: float = 600.0, max_connections: int = 512
) -> httpx.AsyncClient:
    """A client for `HttpForwarder`: calls may be silent for long, since a gateway pings its streams."""
    timeout = httpx.Timeout(silence_s, connect=connect_s)
    limits = httpx.Limits(max_connections=max_connections, max_keepalive_connections=max_connections)
    return httpx.AsyncClient(timeout=timeout, limits=limits, trust_env=False)
