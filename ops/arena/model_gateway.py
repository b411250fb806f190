"""The Arena's model gateway at `/api`: takes a harness's call in any protocol to the registered chat endpoint.

The harness shows the gateway's own key; the endpoint is called with the key of its registration. Session headers pass through.
"""

from __future__ import annotations

import hmac
from collections.abc import AsyncIterator, Awaitable, Callable

import aiohttp
import msgspec
from anyio import create_task_group
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import BaseRoute, Route

from ops.arena.app import cut_connection, faulty_answer, json_response
from ops.arena.config import CallName
from ops.arena.gateway_convert import (
    chat_from_messages,
    chat_from_responses,
    chat_request,
    error_body,
    messages_answer,
    responses_answer,
)
from ops.arena.gateway_stream import MessagesStream, ResponsesStream, StreamConverter
from ops.arena.gateway_wire import AnthropicRequest, ChatCompletion, ErrorDetail, Json, ResponsesRequest
from ops.arena.state import ArenaState, ModelEndpoint

SESSION_HEADERS = ("x-session-id", "x-session-token")
_HOP_HEADERS = ("retry-after", "x-should-retry")


class _RefusalError(Exception):
    def __init__(self, status: int, message: str, *, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.detail = ErrorDetail(message=message, type="invalid_request_error", code=code)


class _Probe(msgspec.Struct):
    model: str
    stream: bool = False


class ModelGateway:
    """Handlers of the model gateway."""

    def __init__(self, state: ArenaState, http: aiohttp.ClientSession, *, llm_api_key: str) -> None:
        self._state = state
        self._http = http
        self._key = llm_api_key.encode()

    def routes(self) -> list[BaseRoute]:
        """Each protocol with and without the version in its path, and health probes that reach no session."""
        routes: list[BaseRoute] = [Route("/", _health), Route("/hello", _health)]
        for prefix in ("", "/v1"):
            routes += [
                Route(f"{prefix}/chat/completions", self._handler("chat_completions"), methods=["POST"]),
                Route(f"{prefix}/responses", self._handler("responses"), methods=["POST"]),
                Route(f"{prefix}/messages", self._handler("messages"), methods=["POST"]),
                Route(f"{prefix}/models", self._models, methods=["GET"]),
            ]
        return routes

    async def _models(self, request: Request) -> Response:
        try:
            self._check_key(request)
        except _RefusalError as refusal:
            return _error(refusal, "chat_completions")
        data = [{"id": name, "object": "model"} for name in self._state.registrations]
        return json_response({"object": "list", "data": data})

    def _handler(self, protocol: str) -> Callable[[Request], Awaitable[Response]]:
        async def handle(request: Request) -> Response:
            faults = self._state.faults.of_call(CallName.MODEL_CALL)
            if (refused := await faulty_answer(faults)) is not None:
                return refused
            try:
                self._check_key(request)
                answer = await self._while_connected(request, protocol)
            except _RefusalError as refusal:
                answer = _error(refusal, protocol)
            if any(fault.kind == "lost_answer" for fault in faults):
                return await cut_connection(request)
            return answer

        return handle

    async def _while_connected(self, request: Request, protocol: str) -> Response:
        """Call upstream; a harness that hangs up takes its call with it."""
        body = await request.body()
        answers: list[Response] = []
        refusals: list[_RefusalError] = []
        async with create_task_group() as group:

            async def watch() -> None:
                while (await request.receive())["type"] != "http.disconnect":
                    continue
                group.cancel_scope.cancel()

            group.start_soon(watch)
            try:
                answers.append(await self._call(request, protocol, body))
            except _RefusalError as refusal:
                refusals.append(refusal)
            group.cancel_scope.cancel()
        if refusals:
            raise refusals[0]
        return answers[0] if answers else Response(status_code=499)

    async def _call(self, request: Request, protocol: str, body: bytes) -> Response:
        try:
            probe = msgspec.json.decode(body, type=_Probe)
            endpoint = self._endpoint(probe.model)
            chat = _as_chat(protocol, body, endpoint.upstream_model)
        except msgspec.MsgspecError as error:
            raise _RefusalError(400, f"unreadable request: {error}") from error
        answer = await self._post(endpoint, chat, request)
        if answer.status != 200:
            raised = await _upstream_error(answer)
            return json_response(error_body(protocol, answer.status, raised), answer.status, _passed_headers(answer))
        if probe.stream:
            events = _events(answer, protocol, probe.model)
            return StreamingResponse(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        async with answer:
            whole = await answer.read()
        if protocol == "chat_completions":
            return Response(whole, media_type="application/json")
        try:
            completion = msgspec.json.decode(whole, type=ChatCompletion)
        except msgspec.MsgspecError as error:
            raise _RefusalError(502, "the upstream's answer is no chat completion") from error
        convert = messages_answer if protocol == "messages" else responses_answer
        return json_response(convert(completion, probe.model))

    async def _post(self, endpoint: ModelEndpoint, chat: Json, request: Request) -> aiohttp.ClientResponse:
        headers = {name: request.headers[name] for name in SESSION_HEADERS if name in request.headers}
        headers |= {"Authorization": f"Bearer {endpoint.api_key}", "Content-Type": "application/json"}
        url = f"{endpoint.base_url}/chat/completions"
        try:
            return await self._http.post(url, data=msgspec.json.encode(chat), headers=headers)
        except (aiohttp.ClientError, TimeoutError) as error:
            raise _RefusalError(502, f"upstream unreachable: {type(error).__name__}") from error

    def _endpoint(self, model: str) -> ModelEndpoint:
        registration = self._state.registrations.get(model)
        if registration is None or not registration.enabled:
            raise _RefusalError(404, f"model {model!r} is not registered", code="model_not_found")
        endpoint = next((e for e in registration.endpoints if e.enabled and "chat" in e.inbound_protos), None)
        if endpoint is None:
            raise _RefusalError(404, f"model {model!r} has no enabled endpoint", code="model_not_found")
        return endpoint

    def _check_key(self, request: Request) -> None:
        bearer = request.headers.get("authorization", "").removeprefix("Bearer ")
        given = request.headers.get("x-api-key") or bearer
        if not hmac.compare_digest(given.encode(), self._key):
            raise _RefusalError(401, "missing or wrong model-gateway key", code="invalid_api_key")


async def _health(_request: Request) -> Response:
    return json_response({"status": "ok"})


def _as_chat(protocol: str, body: bytes, upstream_model: str) -> Json:
    match protocol:
        case "messages":
            return chat_from_messages(msgspec.json.decode(body, type=AnthropicRequest), upstream_model)
        case "responses":
            return chat_from_responses(msgspec.json.decode(body, type=ResponsesRequest), upstream_model)
        case _:
            return chat_request(body, upstream_model)


async def _upstream_error(answer: aiohttp.ClientResponse) -> ErrorDetail:
    async with answer:
        body = await answer.read()
    try:
        detail = msgspec.json.decode(body, type=ChatCompletion).error
    except msgspec.MsgspecError:
        detail = None
    return detail or ErrorDetail(message=f"upstream answered {answer.status}", type="api_error")


def _passed_headers(answer: aiohttp.ClientResponse) -> dict[str, str]:
    return {name: answer.headers[name] for name in _HOP_HEADERS if name in answer.headers}


def _error(refusal: _RefusalError, protocol: str) -> Response:
    return json_response(error_body(protocol, refusal.status, refusal.detail), refusal.status)


async def _events(answer: aiohttp.ClientResponse, protocol: str, model: str) -> AsyncIterator[bytes]:
    async with answer:
        if protocol == "chat_completions":
            async for part in answer.content.iter_any():
                yield part
            return
        converter: StreamConverter = MessagesStream(model) if protocol == "messages" else ResponsesStream(model)
        try:
            async for line in answer.content:
                for event in _converted(converter, line.strip()):
                    yield event
                if line.strip() == b"data: [DONE]":
                    break
        except (aiohttp.ClientError, TimeoutError, msgspec.MsgspecError, _BrokenStreamError) as error:
            detail = (
                error.detail if isinstance(error, _BrokenStreamError) else ErrorDetail(message="the upstream broke off")
            )
            for event in converter.fail(detail):
                yield event
            return
        for event in converter.end():
            yield event


class _BrokenStreamError(Exception):
    def __init__(self, detail: ErrorDetail) -> None:
        super().__init__(detail.message)
        self.detail = detail


def _converted(converter: StreamConverter, line: bytes) -> list[bytes]:
    if line.startswith(b":"):
        return [converter.ping()]
    if not line.startswith(b"data:") or line == b"data: [DONE]":
        return []
    chunk = msgspec.json.decode(line[5:], type=ChatCompletion)
    if chunk.error is not None:
        raise _BrokenStreamError(chunk.error)
    return list(converter.feed(chunk))
