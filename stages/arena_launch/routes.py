"""How a harness in the Arena reaches a session at our gateway.

session_gateway   harness ─▶ Arena's model gateway ─▶ one registration per gateway ─▶ ours; headers name the session
gateway           harness ─▶ Arena's model gateway ─▶ one registration per episode, whose key is the session's token
direct            harness ─▶ ours, by environment variables; no registration
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from typing import Final
from urllib.parse import urlsplit

from schemas.config_arena import ArenaRoute, StreamConfig
from schemas.messages.rollout import EpisodeLaunched
from stages.arena_launch.ports import Access, Route, SessionTicket
from stages.clients.arena.client import ArenaAccess, ModelEndpoint
from stages.clients.arena.registration import Registrations, episode_model_name, session_model_name
from stages.clients.arena.secret import Secret

UPSTREAM_MODEL: Final = "policy"


def make_route(
    kind: ArenaRoute,
    registrations: Registrations,
    access: ArenaAccess,
    *,
    run_label: str,
    worker: str,
    generation_key: Secret,
) -> Route:
    """The configured route."""
    match kind:
        case ArenaRoute.SESSION_GATEWAY:
            return SessionGatewayRoute(
                registrations, access, run_label=run_label, worker=worker, generation_key=generation_key
            )
        case ArenaRoute.GATEWAY:
            return EpisodeRoute(registrations, access, run_label=run_label)
        case ArenaRoute.DIRECT:
            return DirectRoute()


class SessionGatewayRoute:
    """One registration per gateway and Arena, counted users; its key only generates, the headers name the session."""

    name = ArenaRoute.SESSION_GATEWAY.value

    def __init__(
        self,
        registrations: Registrations,
        access: ArenaAccess,
        *,
        run_label: str,
        worker: str,
        generation_key: Secret,
    ) -> None:
        self._registrations: Final = registrations
        self._access: Final = access
        self._run_label: Final = run_label
        self._worker: Final = worker
        self._generation_key: Final = generation_key
        self._endpoints: Final[dict[str, ModelEndpoint]] = {}

    def know(self, gateway_url: str) -> None:
        """Say where a gateway of this run is: what a killed worker registered for it can then be restored."""
        name = self.model_name(gateway_url)
        self._endpoints[name] = _endpoint(name, gateway_url, self._generation_key)

    def model_name(self, gateway_url: str) -> str:
        """The name under which a gateway is registered."""
        return session_model_name(
            self._run_label, arena_url=self._access.base_url, gateway_url=gateway_url, worker=self._worker
        )

    @asynccontextmanager
    async def reach(self, stream: StreamConfig, ticket: SessionTicket) -> AsyncGenerator[Access]:
        name = self.model_name(ticket.base_url)
        endpoint = self._endpoints[name] = _endpoint(name, ticket.base_url, self._generation_key)
        async with self._registrations.hold(name, endpoint, shared=True):
            yield Access(
                model_name=name,
                base_url=self._access.gateway_url,
                api_key=self._access.llm_api_key,
                envs=with_headers(stream.task_envs, session_headers(ticket)),
            )

    @asynccontextmanager
    async def resume(self, launched: EpisodeLaunched) -> AsyncGenerator[None]:
        """A name of this worker's own is restored where it is missing; another's is renewed, and never removed."""
        endpoint = self._endpoints.get(launched.model_name)
        async with self._registrations.adopt(launched.model_name, endpoint, shared=True):
            yield

    async def suspect(self, launched: EpisodeLaunched) -> None:
        """Probe the shared registration, so that the episodes after it find it again."""
        await self._registrations.suspect(launched.model_name)

    async def forget(self, launched: EpisodeLaunched) -> None:
        """The registration is shared: others use it."""


class EpisodeRoute:
    """One registration per episode; its key is the session's token."""

    name = ArenaRoute.GATEWAY.value

    def __init__(self, registrations: Registrations, access: ArenaAccess, *, run_label: str) -> None:
        self._registrations: Final = registrations
        self._access: Final = access
        self._run_label: Final = run_label

    @asynccontextmanager
    async def reach(self, stream: StreamConfig, ticket: SessionTicket) -> AsyncGenerator[Access]:
        name = episode_model_name(self._run_label, ticket.session)
        async with self._registrations.hold(name, _endpoint(name, ticket.base_url, ticket.token), shared=False):
            yield Access(
                model_name=name,
                base_url=self._access.gateway_url,
                api_key=self._access.llm_api_key,
                envs=dict(stream.task_envs),
            )

    @asynccontextmanager
    async def resume(self, launched: EpisodeLaunched) -> AsyncGenerator[None]:
        """Its key, the session's token, died with the worker that registered it: it can only be renewed."""
        async with self._registrations.adopt(launched.model_name, None):
            yield

    async def suspect(self, launched: EpisodeLaunched) -> None:
        """It goes with its episode."""

    async def forget(self, launched: EpisodeLaunched) -> None:
        """Nobody else uses it."""
        await self._registrations.remove_orphans([launched.model_name])


class DirectRoute:
    """The harness calls our gateway itself."""

    name = ArenaRoute.DIRECT.value

    @asynccontextmanager
    async def reach(self, stream: StreamConfig, ticket: SessionTicket) -> AsyncGenerator[Access]:
        token = ticket.token.reveal()
        host = urlsplit(ticket.base_url).hostname or ""
        no_proxy = ",".join(part for part in (stream.task_envs.get("NO_PROXY", ""), host) if part)
        yield Access(
            model_name=UPSTREAM_MODEL,
            base_url=ticket.base_url,
            api_key=ticket.token,
            envs={
                **stream.task_envs,
                "OPENAI_BASE_URL": f"{ticket.base_url}/v1",
                "OPENAI_API_KEY": token,
                "ANTHROPIC_BASE_URL": ticket.base_url,
                "ANTHROPIC_API_KEY": token,
                "NO_PROXY": no_proxy,
                "no_proxy": no_proxy,
            },
        )

    @asynccontextmanager
    async def resume(self, launched: EpisodeLaunched) -> AsyncGenerator[None]:  # noqa: ARG002 - nothing is registered
        yield

    async def suspect(self, launched: EpisodeLaunched) -> None:
        """Nothing is registered."""

    async def forget(self, launched: EpisodeLaunched) -> None:
        """Nothing is registered."""


def with_headers(envs: Mapping[str, str], headers: Mapping[str, str]) -> dict[str, str]:
    """An environment with header lines added to those that it holds already."""
    return {
        **envs,
        **{name: "\n".join(filter(None, (envs.get(name, "").rstrip(), text))) for name, text in headers.items()},
    }


def session_headers(ticket: SessionTicket) -> Mapping[str, str]:
    """Environment variables through which harnesses send the session's headers."""
    lines = f"X-Session-Id: {ticket.session}\nX-Session-Token: {ticket.token.reveal()}"
    return {"ANTHROPIC_CUSTOM_HEADERS": lines, "OPENAI_CUSTOM_HEADERS": lines}


def _endpoint(name: str, gateway_url: str, key: Secret) -> ModelEndpoint:
    return ModelEndpoint(
        endpoint_id=f"{name}-endpoint", upstream_model=UPSTREAM_MODEL, base_url=f"{gateway_url}/v1", api_key=key
    )
