"""Fakes that implement the gateway's ports, and a running gateway over HTTP for tests."""

import re
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import httpx
import msgspec
import numpy as np

from schemas.messages.rollout import FinishReason, InteractionRecorded, InteractionTokens, SessionClosed, SessionOpened
from schemas.payload import PayloadRef, content_id
from stages.gateway.gateway import Gateway
from stages.gateway.http import GatewayApp
from stages.gateway.ports import RecordConflictError, RecorderUnavailableError
from stages.gateway.serve import serve_gateway
from stages.gateway.settings import GatewaySettings
from stages.ports import EngineHealth, GenerateRequest, TokenChunk

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>")
HIDDEN = {"<|endoftext|>", "<|im_start|>", "<|im_end|>"}
IM_END = SPECIALS.index("<|im_end|>")
BYTES_FROM = len(SPECIALS)
_SPLIT = re.compile("|".join(re.escape(one) for one in SPECIALS))


class ByteTokenizer:
    """Special tokens and bytes, with a ChatML template that, like Qwen's, puts results into user turns."""

    vocab_size = BYTES_FROM + 256
    stop_token_ids = (IM_END, 0)

    def render(self, messages, *, tools, add_generation_prompt):
        parts = []
        if tools:
            parts.append(
                "<|im_start|>system\n" + "\n".join(msgspec.json.encode(one).decode() for one in tools) + "<|im_end|>\n"
            )
        for message in messages:
            content = message.get("content") or ""
            if message["role"] == "assistant":
                if message.get("reasoning_content"):
                    content = f"<think>\n{message['reasoning_content']}\n</think>\n\n{content}"
                for call in message.get("tool_calls", ()):
                    content += f"\n<tool_call>\n{msgspec.json.encode(call['function']).decode()}\n</tool_call>"
            if message["role"] == "tool":
                content = f"<tool_response>\n{content}\n</tool_response>"
            role = "user" if message["role"] == "tool" else message["role"]
            parts.append(f"<|im_start|>{role}\n{content}<|im_end|>\n")
        if add_generation_prompt:
            parts.append("<|im_start|>assistant\n")
        return self.encode("".join(parts))

    def encode(self, text):
        ids, at = [], 0
        for found in _SPLIT.finditer(text):
            ids += [BYTES_FROM + one for one in text[at : found.start()].encode()]
            ids.append(SPECIALS.index(found[0]))
            at = found.end()
        return np.array(ids + [BYTES_FROM + one for one in text[at:].encode()], dtype=np.int32)

    def decode(self, token_ids):
        return self._text(token_ids, HIDDEN)

    def show(self, token_ids) -> str:
        """Everything, special tokens too."""
        return self._text(token_ids, set())

    def _text(self, token_ids, hidden):
        out = bytearray()
        for one in np.asarray(token_ids).tolist():
            if one >= BYTES_FROM:
                out.append(one - BYTES_FROM)
            elif SPECIALS[one] not in hidden:
                out += SPECIALS[one].encode()
        return out.decode("utf-8", "replace")


TOKENIZER = ByteTokenizer()
HELLO = {"messages": [{"role": "user", "content": "hi"}]}
CHAT = "/v1/chat/completions"


@dataclass
class FakeEngine:
    """Answers with scripted texts (or chunk lists), one per request, ending the turn; keeps what it was asked."""

    answers: Callable[[GenerateRequest], Any] | Sequence[Any] = ("ok",)
    chunk_size: int = 3
    version: int = 1
    requests: list[GenerateRequest] = field(default_factory=list)
    gate: anyio.Event | None = None
    """Answers wait for it when it is there."""
    started: int = 0
    closed: int = 0
    name: str = "fake"

    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        number = len(self.requests)
        self.requests.append(request)
        answer = self.answers(request) if callable(self.answers) else self.answers[min(number, len(self.answers) - 1)]
        if isinstance(answer, Exception):
            raise answer
        self.started += 1
        try:
            for chunk in self._chunks(answer, request):
                if self.gate is not None:
                    await self.gate.wait()
                await anyio.lowlevel.checkpoint()
                yield chunk
        finally:
            self.closed += 1

    def _chunks(self, answer, request):
        if not isinstance(answer, str):
            yield from answer
            return
        ids = np.append(TOKENIZER.encode(answer), np.int32(IM_END)).astype(np.int32)
        kept = ids[: request.settings.max_new_tokens]
        for at in range(0, kept.size, self.chunk_size):
            part = kept[at : at + self.chunk_size]
            last = at + self.chunk_size >= kept.size
            finish = (FinishReason.STOP if kept.size == ids.size else FinishReason.LENGTH) if last else None
            yield chunk_of(part, version=self.version, finish=finish)

    async def abort(self, request_id): ...
    async def pause(self): ...
    async def resume(self): ...
    async def load_weights(self, directory, version, mode):
        self.version = version

    async def health(self):
        return EngineHealth(ready=True, version=self.version, num_running=0, num_waiting=0, max_context=10**6)


def chunk_of(ids, *, logprobs=None, version=1, finish=None) -> TokenChunk:
    array = np.asarray(ids, dtype=np.int32)
    # A log-prob that depends on the token and its place, so that a mix-up is seen.
    given = -0.001 * (1 + array.astype(np.float32)) if logprobs is None else np.asarray(logprobs, dtype=np.float32)
    return TokenChunk(token_ids=array, logprobs=given.astype(np.float32), version=version, finish_reason=finish)


class MemoryRecorder:
    """The log: create once by key."""

    def __init__(self) -> None:
        self.messages: dict[tuple[Any, ...], Any] = {}
        self.failing = False
        self.gate: anyio.Event | None = None

    async def record(self, message) -> None:
        if self.gate is not None:
            await self.gate.wait()
        await anyio.lowlevel.checkpoint()
        if self.failing:
            raise RecorderUnavailableError("the log is away")
        key = self._key(message)
        if key in self.messages and self.messages[key] != message:
            raise RecordConflictError(str(key))
        self.messages[key] = message

    def _key(self, message):
        match message:
            case SessionOpened():
                return ("opened", message.session, message.gateway)
            case InteractionRecorded():
                return ("interaction", message.session, message.ordinal)
            case _:
                return ("closed", message.session)

    def interactions(self, session: str) -> list[InteractionRecorded]:
        found = [m for k, m in self.messages.items() if k[0] == "interaction" and k[1] == session]
        return sorted(found, key=lambda one: one.ordinal)

    async def read_session(self, session):
        return self.interactions(session)

    async def read_openings(self, session):
        return [m for k, m in self.messages.items() if k[0] == "opened" and k[1] == session]

    async def read_closing(self, session) -> SessionClosed | None:
        return self.messages.get(("closed", session))


class MemoryPayloads:
    def __init__(self) -> None:
        self.data: dict[str, bytes] = {}

    async def put(self, data) -> PayloadRef:
        name = content_id(data)
        self.data[name] = bytes(data)
        return PayloadRef(store="memory", id=name, size_bytes=len(data))

    async def get(self, ref) -> memoryview:
        return memoryview(ref.inline if ref.inline is not None else self.data[ref.id])


@dataclass
class House:
    """A gateway with its fakes."""

    gateway: Gateway
    engine: Any
    recorder: MemoryRecorder
    payloads: MemoryPayloads

    async def tokens(self, session: str) -> list[InteractionTokens]:
        decoder = msgspec.msgpack.Decoder(InteractionTokens)
        return [decoder.decode(await self.payloads.get(one.tokens)) for one in self.recorder.interactions(session)]

    async def chain(self, session: str, ordinal: int) -> list[int]:
        """All ids of an interaction with its ancestors."""
        records, tokens = self.recorder.interactions(session), await self.tokens(session)
        ids: list[int] = []
        at: int | None = ordinal
        while at is not None:
            ids = [*tokens[at].prompt_ids.as_numpy().tolist(), *tokens[at].completion_ids.as_numpy().tolist(), *ids]
            at = records[at].parent
        return ids

    def http(self, token: str = "", **headers: str) -> httpx.AsyncClient:
        """A client in the same process, without a server."""
        auth = {"authorization": f"Bearer {token}"} if token else {}
        transport = httpx.ASGITransport(app=GatewayApp(self.gateway))
        return httpx.AsyncClient(transport=transport, base_url="http://gateway", headers={**auth, **headers})


def house(engine=None, *, recorder=None, payloads=None, tokenizer=TOKENIZER, **settings: Any) -> House:
    ports = {name: settings.pop(name) for name in ("peers", "online", "preprocessors", "clock") if name in settings}
    recorder, payloads = recorder or MemoryRecorder(), payloads or MemoryPayloads()
    engine = engine or FakeEngine()
    gateway = Gateway(
        GatewaySettings(**{"name": "gw-1", "context_length": 100_000, **settings}),
        engine=engine,
        tokenizer=tokenizer,
        recorder=recorder,
        payloads=payloads,
        **ports,
    )
    return House(gateway, engine, recorder, payloads)


@asynccontextmanager
async def served(home: House) -> AsyncIterator[str]:
    """The gateway behind a real server on loopback; gives its base URL."""
    url: list[str] = []
    up = anyio.Event()

    def ready(base_url: str) -> None:
        url.append(base_url)
        up.set()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(serve_gateway, home.gateway, "127.0.0.1", 0, ready)
        with anyio.fail_after(10):
            await up.wait()
        yield url[0]
        tasks.cancel_scope.cancel()


async def ask(
    home: House, token: str, body: dict[str, Any] = HELLO, path: str = CHAT, **headers: str
) -> httpx.Response:
    """One request without a server."""
    async with home.http(token, **headers) as client:
        return await client.post(path, json=body)


CAPTURES = Path(__file__).parent / "captures"
