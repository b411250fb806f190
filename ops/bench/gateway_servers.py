"""The servers that `gateway` measures: ours with an in-process engine, an instant OpenAI server, and other gateways in front of it.

Each runs in a process of its own on one core, the load generator on another, where the machine has two.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Generator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final, cast

import anyio
import msgspec
import numpy as np
import psutil

from pipeline.logs import set_up_logs
from schemas.messages.engines import EngineAnnouncement, EngineState
from schemas.messages.rollout import FinishReason, InteractionRecorded, SessionClosed, SessionOpened
from schemas.payload import PayloadRef, content_id
from stages.gateway.gateway import Gateway
from stages.gateway.ports import SessionMessage
from stages.gateway.serve import serve_gateway
from stages.gateway.settings import GatewayLimits, GatewaySettings, Recording
from stages.ports import EngineHealth, GenerateRequest, SwapMode, TokenChunk, TokenIds, TokenSource
from stages.routing.router import Router
from stages.routing.settings import RoutingSettings

NUM_TOKENS: Final = 200
"""Of each answer."""
_STOP: Final = 0
_START_S: Final = 90.0


class Serving(msgspec.Struct, frozen=True, kw_only=True):
    """A server that answers."""

    host: str
    port: int
    path: str
    tokens: list[str]
    """Keys, one a client."""
    pid: int


class PlainTokenizer:
    """A byte is a token; messages are their text. Costs next to nothing, so that the gateway is measured."""

    vocab_size = 256
    stop_token_ids = (_STOP,)

    def render(
        self, messages: list[dict[str, object]], *, tools: list[dict[str, object]] | None, add_generation_prompt: bool
    ) -> TokenIds:
        """ChatML without special tokens; a turn ends with the stop token."""
        del tools, add_generation_prompt
        return self.encode("".join(f"{one['role']}\n{one['content']}\0" for one in messages) + "assistant\n")

    def encode(self, text: str) -> TokenIds:
        """Bytes."""
        return np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int32)

    def decode(self, token_ids: TokenIds) -> str:
        """Bytes without the stop token."""
        return token_ids.astype(np.uint8).tobytes().replace(b"\0", b"").decode("utf-8", "replace")


class InstantEngine:
    """Answers at once with the same tokens, so many a chunk."""

    name = "instant"

    def __init__(self, num_tokens: int, chunk_tokens: int) -> None:
        ids = np.resize(np.frombuffer(b"the quick brown fox ", dtype=np.uint8), num_tokens).astype(np.int32)
        ids[-1] = _STOP
        self._chunks = [
            TokenChunk(
                token_ids=ids[at : at + chunk_tokens],
                logprobs=np.full(ids[at : at + chunk_tokens].size, -0.5, dtype=np.float32),
                version=1,
                finish_reason=FinishReason.STOP if at + chunk_tokens >= num_tokens else None,
            )
            for at in range(0, num_tokens, chunk_tokens)
        ]

    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        """The same answer, whatever is asked."""
        del request
        for chunk in self._chunks:
            yield chunk

    async def abort(self, request_id: str) -> None:
        """Nothing runs for long."""

    async def pause(self) -> None:
        """Nothing runs for long."""

    async def resume(self) -> None:
        """Nothing runs for long."""

    async def load_weights(self, directory: str, version: int, mode: SwapMode) -> None:
        """There are none."""

    async def health(self) -> EngineHealth:
        """Always ready."""
        return EngineHealth(ready=True, version=1, num_running=0, num_waiting=0, max_context=10**7)


class CountingLog:
    """A log that stores at once and forgets: what the gateway itself costs."""

    def __init__(self) -> None:
        self.num_recorded = 0

    async def record(self, message: SessionMessage) -> None:
        """Counts."""
        await anyio.lowlevel.checkpoint()
        self.num_recorded += isinstance(message, InteractionRecorded)

    async def read_session(self, session: str) -> list[InteractionRecorded]:
        """Nothing was kept."""
        del session
        return []

    async def read_openings(self, session: str) -> list[SessionOpened]:
        """Nothing was kept."""
        del session
        return []

    async def read_closing(self, session: str) -> SessionClosed | None:
        """Nothing was kept."""
        del session

    async def put(self, data: bytes | memoryview) -> PayloadRef:
        """Named, not kept."""
        return PayloadRef(store="none", id=content_id(data), size_bytes=len(data))

    async def get(self, ref: PayloadRef) -> memoryview:
        """Nothing was kept."""
        raise KeyError(ref.id)


def make_router(num_engines: int, num_tokens: int, chunk_tokens: int) -> Router:
    """A router over engines that answer at once."""
    router = Router(RoutingSettings(silent_s=1e9))
    for number in range(num_engines):
        name = f"engine-{number}"
        serving = EngineAnnouncement(name=name, kind="instant", state=EngineState.SERVING, version=1, capacity=64)
        router.join(InstantEngine(num_tokens, chunk_tokens), serving)
    return router


def make_gateway(
    recording: Recording, *, num_tokens: int = NUM_TOKENS, chunk_tokens: int = NUM_TOKENS, num_engines: int = 0
) -> Gateway:
    """A gateway with nothing slow behind it: an engine in its process, or a router over `num_engines`."""
    log = CountingLog()
    limits = GatewayLimits(max_sessions=10_000)
    settings = GatewaySettings(name="bench", context_length=10**7, recording=recording, reasoning=False, limits=limits)
    engine: TokenSource = InstantEngine(num_tokens, chunk_tokens)
    if num_engines:
        engine = make_router(num_engines, num_tokens, chunk_tokens)
    return Gateway(settings, engine=engine, tokenizer=PlainTokenizer(), recorder=log, payloads=log)


def _pin(core: int) -> None:
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[core % len(cores)]})


def _run_gateway(
    answer: Connection, recording: Recording, chunk_tokens: int, num_sessions: int, num_engines: int
) -> None:
    _pin(0)
    set_up_logs(process="bench", level="WARNING")

    async def main() -> None:
        gateway = make_gateway(recording, chunk_tokens=chunk_tokens, num_engines=num_engines)
        tickets = [await gateway.open_session(f"s{number}") for number in range(num_sessions)]
        await serve_gateway(gateway, ready=lambda url: answer.send((url, [one.token for one in tickets])))

    anyio.run(main, backend_options={"use_uvloop": True})


@contextmanager
def our_gateway(
    recording: Recording, *, chunk_tokens: int, num_sessions: int, num_engines: int = 0
) -> Generator[Serving]:
    """Our gateway, serving; with `num_engines` through the router."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(
        target=_run_gateway, args=(theirs, recording, chunk_tokens, num_sessions, num_engines), daemon=True
    )
    process.start()
    try:
        if not ours.poll(_START_S):
            raise TimeoutError(f"the gateway did not start within {_START_S:g} s")
        url, tokens = ours.recv()
        host, port = url.removeprefix("http://").split(":")
        yield Serving(host=host, port=int(port), path="/v1/chat/completions", tokens=tokens, pid=process.pid or 0)
    finally:
        process.terminate()
        process.join(10)


_TEXT: Final = "the quick brown fox " * (NUM_TOKENS // 20) * 2


def _upstream_bodies() -> tuple[bytes, bytes]:
    usage = {"prompt_tokens": 9, "completion_tokens": NUM_TOKENS, "total_tokens": NUM_TOKENS + 9}
    head = {"id": "chatcmpl-1", "created": 1, "model": "policy"}
    choice = {"index": 0, "message": {"role": "assistant", "content": _TEXT}, "finish_reason": "stop"}
    whole = msgspec.json.encode({**head, "object": "chat.completion", "choices": [choice], "usage": usage})
    chunks = [
        {
            **head,
            "object": "chat.completion.chunk",
            "choices": [{"index": 0, "delta": {"content": "word "}, "finish_reason": None}],
        }
    ] * NUM_TOKENS
    last = {**head, "object": "chat.completion.chunk", "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
    events = [b"data: %b\n\n" % msgspec.json.encode(one) for one in [*chunks, last]] + [b"data: [DONE]\n\n"]
    stream = b"".join(b"%x\r\n%b\r\n" % (len(event), event) for event in events) + b"0\r\n\r\n"
    plain = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(whole), whole)
    streamed = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n" + stream
    return plain, streamed


class _Upstream(asyncio.Protocol):
    """An OpenAI server as fast as Python can be: two canned answers."""

    plain, streamed = _upstream_bodies()
    models = msgspec.json.encode({"object": "list", "data": [{"id": "policy", "object": "model"}], "status": "ok"})

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._data = b""

    def data_received(self, data: bytes) -> None:
        self._data += data
        while (end := self._data.find(b"\r\n\r\n")) >= 0:
            head = self._data[:end].lower()
            _, found, rest = head.partition(b"content-length:")
            size = int(rest.split(b"\r\n", 1)[0]) if found else 0
            if len(self._data) < end + 4 + size:
                return
            body = self._data[end + 4 : end + 4 + size]
            self._data = self._data[end + 4 + size :]
            self._answer(head, body)

    def _answer(self, head: bytes, body: bytes) -> None:
        if head.startswith(b"post"):
            streams = b'"stream":true' in body.replace(b" ", b"")
            self._write(self.streamed if streams else self.plain)
        else:
            start = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
            self._write(start % len(self.models) + self.models)

    def _write(self, data: bytes) -> None:
        # cast: what a TCP server gets can be written to; uvloop's transports are no subclasses.
        cast("asyncio.WriteTransport", self._transport).write(data)


def _run_upstream(answer: Connection) -> None:
    _pin(1)

    async def main() -> None:
        server = await asyncio.get_running_loop().create_server(_Upstream, "127.0.0.1", 0)
        answer.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    anyio.run(main, backend_options={"use_uvloop": True})


@contextmanager
def upstream() -> Generator[Serving]:
    """The server behind other gateways."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_run_upstream, args=(theirs,), daemon=True)
    process.start()
    try:
        if not ours.poll(_START_S):
            raise TimeoutError(f"the upstream server did not start within {_START_S:g} s")
        yield Serving(
            host="127.0.0.1", port=ours.recv(), path="/v1/chat/completions", tokens=["key"] * 64, pid=process.pid or 0
        )
    finally:
        process.terminate()
        process.join(10)


def clients_folder() -> Path:
    """Where `tests/resources/install_clients.sh --competitors` puts them."""
    return Path(os.environ.get("HEADRACE_CACHE", str(Path.home() / ".cache" / "headrace"))) / "clients"


def competitor_command(name: str, url: str, port: int, folder: Path) -> tuple[list[str], str]:
    """How another gateway is started in front of `url`, and the path that it serves.

    Raises:
        FileNotFoundError: it is not installed.
    """
    programs = {
        "litellm": "litellm-proxy/bin/litellm",
        "rllm": "rllm-gateway/bin/rllm-model-gateway",
        "smg": "smg/bin/smg",
    }
    program = clients_folder() / programs[name]
    if not program.exists():
        raise FileNotFoundError(f"{program} is missing: run tests/resources/install_clients.sh --competitors")
    address = ["--host", "127.0.0.1", "--port", str(port)]
    match name:
        case "litellm":
            parameters = {"model": "openai/policy", "api_base": f"{url}/v1", "api_key": "key"}
            config = folder / "litellm.json"
            config.write_bytes(
                msgspec.json.encode({"model_list": [{"model_name": "policy", "litellm_params": parameters}]})
            )
            return [str(program), "--config", str(config), *address], "/v1/chat/completions"
        case "rllm":
            command = [str(program), "--worker", f"{url}/v1", "--store", "memory", "--log-level", "warning", *address]
            return command, "/sessions/bench/v1/chat/completions"
        case _:
            checks = ["--disable-health-check", "--disable-retries", "--log-level", "error"]
            return [
                str(program),
                "launch",
                "--worker-urls",
                url,
                "--backend",
                "openai",
                *checks,
                *address,
            ], "/v1/chat/completions"


@contextmanager
def competitor(name: str, behind: Serving, folder: Path, works: Callable[[Serving], bool]) -> Generator[Serving]:
    """Another gateway in front of the upstream server, once `works` says that it answers.

    Raises:
        FileNotFoundError: it is not installed.
        TimeoutError: it did not start.
    """
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = int(probe.getsockname()[1])
    command, path = competitor_command(name, f"http://{behind.host}:{behind.port}", port, folder)
    env = {**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True", "NO_PROXY": "127.0.0.1", "LITELLM_LOG": "ERROR"}
    with (folder / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=env, cwd=folder)  # noqa: S603 - installed by the user
    try:
        if hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(process.pid, {min(os.sched_getaffinity(0))})
        serving = Serving(host="127.0.0.1", port=port, path=path, tokens=["key"] * 64, pid=process.pid)
        deadline_s = time.monotonic() + _START_S
        while not works(serving):
            if process.poll() is not None or time.monotonic() > deadline_s:
                tail = (folder / f"{name}.log").read_text(errors="replace")[-2000:]
                raise TimeoutError(f"{name} did not answer within {_START_S:g} s: {tail}")
            time.sleep(0.5)
        yield serving
    finally:
        _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    try:
        family = [*psutil.Process(process.pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        family = []
    process.kill()
    for one in family:
        one.kill()
    process.wait(10)
