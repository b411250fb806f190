"""The control plane of the local Arena as a Starlette app: one handler per row of the API table.

Every handler runs behind one guard that checks the token and plays the fault plan.
"""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable
from typing import TypeVar

import anyio
import anyio.abc
import anyio.lowlevel
import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from ops.arena.config import CallFault, CallName
from ops.arena.episodes import EpisodeRunner
from ops.arena.state import ArenaState, Json, LaunchRequest, Registration, Task

Handler = Callable[[Request], Awaitable[Response]]
_MAX_PAGE = 1000
T = TypeVar("T")


class ApiError(Exception):
    """An answer other than success."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def json_response(value: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A JSON answer."""
    return Response(msgspec.json.encode(value), status, headers, media_type="application/json")


async def cut_connection(request: Request) -> Response:
    """Drop the connection without an answer. The response returned goes nowhere."""
    request.state.abort_connection()
    await anyio.lowlevel.checkpoint()
    return Response(status_code=500)


class ControlPlane:
    """Handlers over one Arena's state."""

    def __init__(self, state: ArenaState, runner: EpisodeRunner, group: anyio.abc.TaskGroup, *, token: str) -> None:
        self._state = state
        self._runner = runner
        self._group = group
        self._authorization = f"Bearer {token}".encode()

    def routes(self) -> list[BaseRoute]:
        """All rows of the API table, below the base path."""
        get, post, c = ["GET"], ["POST"], CallName
        routes: list[BaseRoute] = [
            self._route("/streams", c.STREAMS_LIST, self._list_streams, get),
            self._route("/streams/{stream_id}", c.STREAMS_GET, self._get_stream, get),
            self._route("/streams/{stream_id}/dataset", c.DATASET, self._dataset, post),
            self._route("/streams/{stream_id}/tasks", c.TASKS, self._list_tasks, get),
            self._route("/streams/{stream_id}/launch_one_task", c.LAUNCH, self._launch, post),
            self._route("/harnesses/{key}/versions/{version}", c.HARNESS, self._harness, get),
            self._route("/llm/models", c.MODELS_REGISTER, self._register, post),
            self._route("/llm/models/{name}", c.MODELS_GET, self._get_model, get),
            self._route("/llm/models/{name}", c.MODELS_RENEW, self._renew_model, ["PATCH"]),
            self._route("/llm/models/{name}", c.MODELS_DELETE, self._delete_model, ["DELETE"]),
            self._route("/tasks/{task_id}/result", c.RESULT, self._result, get),
        ]
        if self._state.config.receipt_enabled:
            routes.append(self._route("/tasks/{task_id}/receipt", c.RECEIPT, self._receipt, get))
        return routes

    def _route(self, path: str, call: CallName, handler: Handler, methods: list[str]) -> Route:
        async def guarded(request: Request) -> Response:
            given = request.headers.get("authorization", "").encode()
            if not hmac.compare_digest(given, self._authorization):
                return json_response({"error": "missing or wrong bearer token"}, 401)
            faults = self._state.faults.of_call(call)
            if (refusal := await faulty_answer(faults)) is not None:
                return refusal
            request.state.changed_total = any(fault.kind == "changed_total" for fault in faults)
            try:
                answer = await handler(request)
            except ApiError as error:
                answer = json_response({"error": str(error)}, error.status)
            if any(fault.kind == "lost_answer" for fault in faults):
                return await cut_connection(request)
            return answer

        return Route(path, guarded, methods=methods)

    async def _list_streams(self, request: Request) -> Response:
        status = request.query_params.get("status")
        found = [self._state.stream(stream_id) for stream_id in self._state.sources]
        return json_response({"items": [s for s in found if status in (None, s["status"])]})

    async def _get_stream(self, request: Request) -> Response:
        return self._wrapped(self._state.stream(self._stream_id(request)), "stream")

    async def _dataset(self, request: Request) -> Response:
        source = self._state.sources[self._stream_id(request)]
        limit, offset = _page(request)
        total = len(source.data_ids)
        ids = source.data_ids[offset : offset + limit]
        if request.state.changed_total:
            total += 1
        items = [{"data_id": data_id, "tags": source.tags()} for data_id in ids]
        page = {"data_ids": ids, "count": len(ids), "total": total, "offset": offset, "limit": limit}
        return json_response({**page, "items": items})

    async def _list_tasks(self, request: Request) -> Response:
        limit, offset = _page(request)
        tasks = self._state.stream_tasks(self._stream_id(request))
        items = [task.listed() for task in tasks[offset : offset + limit]]
        if self._state.config.envelope != "bare":
            return json_response({"data": items})
        return json_response({"items": items, "total": len(tasks), "limit": limit, "offset": offset})

    async def _harness(self, request: Request) -> Response:
        key, version = request.path_params["key"], request.path_params["version"]
        harness = self._state.harnesses.get(f"{key}@{version}")
        if harness is None:
            raise ApiError(404, f"no harness {key}@{version}")
        return self._wrapped({"key": key, "version": version, "status": harness.status}, "harness")

    async def _register(self, request: Request) -> Response:
        registration = await _body(request, Registration)
        if not any("chat" in endpoint.inbound_protos for endpoint in registration.endpoints):
            raise ApiError(422, "no endpoint takes the chat protocol: expected inbound_protos with 'chat'")
        known = self._state.registrations.get(registration.model_name)
        if known is not None and known.metadata.get("deployment_id") != registration.metadata.get("deployment_id"):
            raise ApiError(409, f"{registration.model_name} belongs to another deployment")
        self._state.registrations[registration.model_name] = registration
        return json_response({"model_name": registration.model_name})

    async def _get_model(self, request: Request) -> Response:
        return self._wrapped(self._registration(request).shown(), "")

    async def _renew_model(self, request: Request) -> Response:
        return json_response({"model_name": self._registration(request).model_name})

    async def _delete_model(self, request: Request) -> Response:
        name = self._registration(request).model_name
        del self._state.registrations[name]
        return Response(status_code=204)

    async def _launch(self, request: Request) -> Response:
        stream_id = self._stream_id(request)
        launch = await _body(request, LaunchRequest)
        source = self._state.sources[stream_id]
        if launch.data_id not in source:
            raise ApiError(422, f"stream {stream_id} has no data_id {launch.data_id!r}")
        name = launch.harness or source.spec.harness
        harness = self._state.harnesses.get(name)
        if harness is None or harness.status != "PUBLISHED":
            raise ApiError(422, f"harness {name!r} is not published; published: {sorted(self._state.harnesses)}")
        task = self._state.add(stream_id, launch, harness)
        fault = self._state.faults.of_episode(stream_id)
        if fault is not None and fault.kind == "immediate":
            await self._runner.run(task, fault)
            return self._wrapped(task.result(), "result")
        self._group.start_soon(self._runner.run, task, fault)
        return json_response({"accepted": True, "task_id": task.task_id, "status": "PENDING"}, 202)

    async def _result(self, request: Request) -> Response:
        return self._wrapped(self._task(request).result(), "result")

    async def _receipt(self, request: Request) -> Response:
        task = self._task(request)
        if task.receipt is None:
            raise ApiError(404, f"task {task.task_id} has no receipt")
        return Response(bytes(task.receipt), media_type="application/json")

    def _stream_id(self, request: Request) -> str:
        stream_id: str = request.path_params["stream_id"]
        if stream_id not in self._state.sources:
            raise ApiError(404, f"no stream {stream_id!r}")
        return stream_id

    def _registration(self, request: Request) -> Registration:
        name: str = request.path_params["name"]
        found = self._state.registrations.get(name)
        if found is None:
            raise ApiError(404, f"no registered model {name!r}")
        return found

    def _task(self, request: Request) -> Task:
        task_id: str = request.path_params["task_id"]
        task = self._state.tasks.get(task_id)
        if task is None:
            raise ApiError(404, f"no task {task_id!r}")
        return task

    def _wrapped(self, value: Json, inner: str) -> Response:
        envelope = self._state.config.envelope
        if envelope == "nested" and inner:
            value = {inner: value}
        return json_response(value if envelope == "bare" else {"data": value})


async def faulty_answer(faults: list[CallFault]) -> Response | None:
    """Play delays; answer with a planned error status where there is one."""
    for fault in faults:
        if fault.delay_s:
            await anyio.sleep(fault.delay_s)
    for fault in faults:
        if fault.kind == "status":
            headers = {"Retry-After": str(fault.retry_after_s)} if fault.retry_after_s is not None else None
            return json_response({"error": f"planned fault {fault.status}"}, fault.status, headers)
    return None


async def _body(request: Request, type_: type[T]) -> T:
    try:
        return msgspec.json.decode(await request.body(), type=type_)
    except msgspec.MsgspecError as error:
        raise ApiError(422, f"unreadable body: {error}") from error


def _page(request: Request) -> tuple[int, int]:
    try:
        limit = int(request.query_params.get("limit", "100"))
        offset = int(request.query_params.get("offset", "0"))
    except ValueError as error:
        raise ApiError(422, "limit and offset must be whole numbers") from error
    if not 1 <= limit <= _MAX_PAGE or offset < 0:
        raise ApiError(422, f"limit {limit}, offset {offset}: expected limit 1 to {_MAX_PAGE} and offset 0 or more")
    return limit, offset
