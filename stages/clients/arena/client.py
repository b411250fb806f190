"""Every call of the Arena API: one pooled HTTP client, retries, typed errors, strictly read answers.

Knows the API and nothing of groups, sessions or the log. The launch is sent once, whatever happens; what to do about a lost
answer is the caller's decision.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from urllib.parse import quote

import anyio
import httpx
import msgspec
from httpx_aiohttp import AiohttpTransport

from stages.clients.arena.errors import (
    ArenaBusyError,
    ArenaConnectionError,
    ArenaContractError,
    ArenaLaunchLostError,
    ArenaNotFoundError,
    TaskResultError,
)
from stages.clients.arena.secret import Secret
from stages.clients.arena.transport import Clock, Heard, Method, Request, Sleep, Transport, nobody_asks
from stages.clients.arena.wire import (
    MAX_PAGE_ROWS,
    ArenaStream,
    DatasetPage,
    DatasetRow,
    Json,
    StreamTask,
    TaskResult,
    is_json,
    join_pages,
    read_page,
    read_result,
    read_stream,
    read_streams,
    read_tasks,
    shown,
)

_SHORTEST_SECRET = 8
"""Shorter values of environment variables are words like `1` or `true`, not credentials."""


class ArenaAccess(msgspec.Struct, frozen=True, kw_only=True):
    """Where an Arena is, and as whom and how it is called."""

    base_url: str
    """Without `/openapi/v1` and without a trailing slash."""
    token: Secret
    """Of the control plane."""
    llm_api_key: Secret
    """Of the Arena's model gateway."""
    request_timeout_s: float = 60.0
    registration_timeout_s: float = 180.0
    request_retries: int = 3
    max_connections: int = 256

    @property
    def gateway_url(self) -> str:
        """Where a harness reaches the model."""
        return f"{self.base_url}/api"


class ModelEndpoint(msgspec.Struct, frozen=True, kw_only=True):
    """Where the Arena's model gateway sends a registered model's calls."""

    endpoint_id: str
    upstream_model: str
    base_url: str
    """Ours, with `/v1`, without a trailing slash."""
    api_key: Secret
    """Generation only."""


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """One task to be launched."""

    stream_id: str
    data_id: str
    model_name: str
    base_url: str
    api_key: Secret
    envs: dict[str, str]
    """Holds credentials; goes to the Arena and nowhere else."""
    session_id: str = ""
    harness: str = ""

    def __repr__(self) -> str:
        return f"Launch(stream_id={self.stream_id!r}, data_id={self.data_id!r}, envs={sorted(self.envs)})"


class ArenaClient:
    """All calls of the API; open it with `open_arena`."""

    def __init__(self, access: ArenaAccess, transport: Transport) -> None:
        self.access = access
        self._transport = transport

    def silent_s(self) -> float:
        """For how long the Arena has answered nothing although it is asked; 0 while it is asked nothing."""
        return self._transport.silent_s()

    async def list_streams(self, status: str = "ACTIVE") -> list[ArenaStream]:
        """GET /streams."""
        return read_streams(await self._ask("GET", "/streams", params={"status": status}))

    async def get_stream(self, stream_id: str) -> ArenaStream:
        """GET /streams/{id}: the stream asked for, ACTIVE."""
        return read_stream(await self._ask("GET", f"/streams/{_part(stream_id)}"), stream_id)

    async def list_dataset(self, stream_id: str) -> list[DatasetRow]:
        """All rows of a stream: the total first, then pages.

        Raises:
            DatasetPagingError: The pages contradict each other.
        """
        first = await self._page(stream_id, offset=0, limit=1)
        pages = [
            await self._page(stream_id, offset=offset, limit=min(MAX_PAGE_ROWS, first.total - offset))
            for offset in range(0, first.total, MAX_PAGE_ROWS)
        ]
        return join_pages(stream_id, first.total, pages)

    async def list_tasks(self, stream_id: str, *, limit: int = 100, offset: int = 0) -> list[StreamTask]:
        """GET /streams/{id}/tasks, the latest first."""
        path = f"/streams/{_part(stream_id)}/tasks"
        return read_tasks(await self._ask("GET", path, params={"limit": limit, "offset": offset}), stream_id)

    async def harness_status(self, key: str, version: str) -> str:
        """GET /harnesses/{key}/versions/{version}: its status, PUBLISHED where it can be used."""
        answer = await self._ask("GET", f"/harnesses/{_part(key)}/versions/{_part(version)}")
        value = _unwrapped(answer, "status", ("data", "harness", "version"))
        status = value.get("status")
        if not isinstance(status, str):
            raise ArenaContractError(f"harness {key}@{version}: expected a status, found {shown(answer)}")
        return status

    async def register_model(self, name: str, endpoint: ModelEndpoint, *, deployment_id: str) -> None:
        """POST /llm/models: the Arena must answer with the same name."""
        body: Json = {
            "model_name": name,
            "endpoints": [
                {
                    "endpoint_id": endpoint.endpoint_id,
                    "upstream_model": endpoint.upstream_model,
                    "base_url": endpoint.base_url.rstrip("/"),
                    "api_key": endpoint.api_key.reveal(),
                    "inbound_protos": ["chat"],
                    "enabled": True,
                }
            ],
            "enabled": True,
            "metadata": {"deployment_id": deployment_id},
        }
        answer = await self._register("POST", "/llm/models", body=body, secrets=(endpoint.api_key,))
        _check_name(answer, name)

    async def get_model(self, name: str) -> Json | None:
        """GET /llm/models/{name}; None where it is missing."""
        try:
            answer = await self._register("GET", f"/llm/models/{_part(name)}")
        except ArenaNotFoundError:
            return None
        value = _unwrapped(answer, "model_name", ("data",))
        _check_name(value, name)
        return value

    async def renew_model(self, name: str) -> bool:
        """PATCH /llm/models/{name}: whether it still stands; False is a confirmed 404."""
        try:
            answer = await self._register("PATCH", f"/llm/models/{_part(name)}", body={})
        except ArenaNotFoundError:
            return False
        _check_name(answer, name)
        return True

    async def delete_model(self, name: str) -> bool:
        """DELETE /llm/models/{name}: gone afterwards; False where it was missing."""
        try:
            await self._register("DELETE", f"/llm/models/{_part(name)}")
        except ArenaNotFoundError:
            return False
        return True

    async def launch(self, launch: Launch) -> TaskResult:
        """POST /streams/{id}/launch_one_task, once: PENDING, or a terminal result at once.

        Raises:
            ArenaLaunchLostError: No answer, or one that leaves open whether the task runs.
            ArenaBusyError: 429: it does not run.
            ArenaRefusedError: It does not run and never will.
        """
        ours = {"MODEL_NAME": launch.model_name, "BASE_URL": launch.base_url, "API_KEY": launch.api_key.reveal()}
        body: Json = {
            "data_id": launch.data_id,
            "model_name": launch.model_name,
            "base_url": launch.base_url,
            "api_key": launch.api_key.reveal(),
            "envs": {**launch.envs, **ours},
        }
        if launch.session_id:
            body["session_id"] = launch.session_id
        if launch.harness:
            body["harness"] = launch.harness
        path = f"/streams/{_part(launch.stream_id)}/launch_one_task"
        try:
            answer = await self._ask("POST", path, body=body, secrets=_secrets_of(launch), tries=1)
        except (ArenaConnectionError, ArenaContractError) as error:
            raise ArenaLaunchLostError(f"{error}; the task may run") from error
        except ArenaBusyError as error:
            if error.status == 429:
                raise
            raise ArenaLaunchLostError(f"{error}; the task may run") from error
        try:
            return read_result(answer, None)
        except TaskResultError as error:
            raise ArenaLaunchLostError(f"{error}; the task may run") from error

    async def task_result(self, task_id: str) -> TaskResult:
        """GET /tasks/{task_id}/result."""
        return read_result(await self._ask("GET", f"/tasks/{_part(task_id)}/result"), task_id)

    async def receipt(self, path: str, task_id: str) -> object:
        """A task's own receipt at the configured path; None where there is none."""
        try:
            return await self._ask("GET", path.replace("{task_id}", _part(task_id)))
        except ArenaNotFoundError:
            return None

    async def generate_once(self, model_name: str, headers: Mapping[str, str] | None = None) -> None:
        """One tiny generation through the Arena's model gateway: proves its key, which no control-plane call does."""
        body: Json = {"model": model_name, "messages": [{"role": "user", "content": "ping"}], "max_tokens": 1}
        url = f"{self.access.gateway_url}/v1/chat/completions"
        answer = await self._transport.send(
            Request(
                method="POST",
                url=url,
                authorization=self.access.llm_api_key,
                tries=self.access.request_retries + 1,
                timeout_s=self.access.request_timeout_s,
                body=body,
                headers=headers or {},
                secrets=tuple(Secret(value) for value in (headers or {}).values()),
            )
        )
        if not is_json(answer) or not answer.get("choices"):
            raise ArenaContractError(f"model gateway: expected a chat completion, found {shown(answer)}")

    async def _page(self, stream_id: str, *, offset: int, limit: int) -> DatasetPage:
        path = f"/streams/{_part(stream_id)}/dataset"
        answer = await self._ask("POST", path, params={"limit": limit, "offset": offset})
        return read_page(answer, stream_id=stream_id, offset=offset, limit=limit)

    async def _ask(
        self,
        method: Method,
        path: str,
        *,
        params: Mapping[str, str | int] | None = None,
        body: Json | None = None,
        secrets: tuple[Secret, ...] = (),
        tries: int | None = None,
    ) -> object:
        return await self._transport.send(
            Request(
                method=method,
                url=f"{self.access.base_url}/openapi/v1{path}",
                authorization=self.access.token,
                tries=self.access.request_retries + 1 if tries is None else tries,
                timeout_s=self.access.request_timeout_s,
                params=params or {},
                body=body,
                secrets=secrets,
            )
        )

    async def _register(
        self, method: Method, path: str, *, body: Json | None = None, secrets: tuple[Secret, ...] = ()
    ) -> object:
        """A registration call, all its tries within the registration's own deadline."""
        try:
            with anyio.fail_after(self.access.registration_timeout_s):
                return await self._ask(method, path, body=body, secrets=secrets)
        except TimeoutError as error:
            limit = f"{self.access.registration_timeout_s} s"
            raise ArenaConnectionError(f"{method} {path}: no answer within {limit}, tries included") from error


@asynccontextmanager
async def open_arena(
    access: ArenaAccess,
    *,
    sleep: Sleep = anyio.sleep,
    clock: Clock | None = None,
    heard: Heard = nobody_asks,
) -> AsyncGenerator[ArenaClient]:
    """A client with its connection pool, closed at the end.

    Args:
        access: Where and as whom.
        sleep: Waits between tries; a test gives one that doesn't wait.
        clock: The time, for Retry-After dates; None is the system's.
        heard: Told after each try whether the Arena answered.
    """
    limits = httpx.Limits(max_connections=access.max_connections, max_keepalive_connections=access.max_connections)
    timeout = httpx.Timeout(access.request_timeout_s)
    async with httpx.AsyncClient(transport=AiohttpTransport(limits=limits), timeout=timeout) as http:
        known = (access.token, access.llm_api_key)
        transport = Transport(http, known=known, sleep=sleep, clock=clock or _now, heard=heard)
        yield ArenaClient(access, transport)


def _now() -> datetime:
    return datetime.now(UTC)


def _part(text: str) -> str:
    """An id as one segment of a path."""
    return quote(text, safe="")


def _secrets_of(launch: Launch) -> tuple[Secret, ...]:
    return (launch.api_key, *(Secret(value) for value in launch.envs.values() if len(value) >= _SHORTEST_SECRET))


def _unwrapped(answer: object, field: str, envelopes: tuple[str, ...]) -> Json:
    value = answer
    for name in envelopes:
        if is_json(value) and field not in value and is_json(value.get(name)):
            value = value[name]
    return value if is_json(value) else {}


def _check_name(answer: object, name: str) -> None:
    found = _unwrapped(answer, "model_name", ("data",)).get("model_name")
    if found != name:
        raise ArenaContractError(f"registration {name!r}: the Arena answered with model_name {shown(found)}")
