"""How a harness speaks: request bodies, and replies out of whole or streamed answers, per protocol. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec

from ops.arena.config import HarnessSpec

Turns = list[tuple[str, str]]
"""(role, text) in order, without the system prompt."""


class Dialect(msgspec.Struct, frozen=True, kw_only=True):
    """One protocol, as a harness uses it."""

    path: str
    """Below the endpoint's base URL."""
    body: Callable[[HarnessSpec, str, Turns], dict[str, object]]
    reply: Callable[[bytes], str]
    """Text of a whole answer."""
    delta: Callable[[bytes], str]
    """Text in one event of a streamed answer."""


class _ChatMessage(msgspec.Struct):
    content: str | None = None


class _ChatChoice(msgspec.Struct):
    message: _ChatMessage = msgspec.field(default_factory=_ChatMessage)
    delta: _ChatMessage = msgspec.field(default_factory=_ChatMessage)


class _Chat(msgspec.Struct):
    choices: list[_ChatChoice] = []


class _Block(msgspec.Struct):
    type: str = ""
    text: str = ""


class _Message(msgspec.Struct):
    content: list[_Block] = []


class _MessageEvent(msgspec.Struct):
    type: str = ""
    delta: _Block = msgspec.field(default_factory=_Block)


class _Item(msgspec.Struct):
    content: list[_Block] = []


class _Response(msgspec.Struct):
    output: list[_Item] = []


class _ResponseEvent(msgspec.Struct):
    type: str = ""
    delta: str = ""


def _sampling(harness: HarnessSpec, limit_name: str) -> dict[str, object]:
    body: dict[str, object] = {limit_name: harness.max_tokens}
    if harness.temperature is not None:
        body["temperature"] = harness.temperature
    if harness.stream:
        body["stream"] = True
    return body


def _messages(turns: Turns) -> list[dict[str, str]]:
    return [{"role": role, "content": text} for role, text in turns]


def _chat_body(harness: HarnessSpec, model: str, turns: Turns) -> dict[str, object]:
    system: Turns = [("system", harness.system)] if harness.system else []
    return {"model": model, "messages": _messages(system + turns), **_sampling(harness, "max_tokens")}


def _messages_body(harness: HarnessSpec, model: str, turns: Turns) -> dict[str, object]:
    body: dict[str, object] = {"model": model, "messages": _messages(turns), **_sampling(harness, "max_tokens")}
    if harness.system:
        body["system"] = harness.system
    return body


def _responses_body(harness: HarnessSpec, model: str, turns: Turns) -> dict[str, object]:
    body: dict[str, object] = {"model": model, "input": _messages(turns), **_sampling(harness, "max_output_tokens")}
    if harness.system:
        body["instructions"] = harness.system
    return body


def _joined(blocks: Iterable[_Block]) -> str:
    return "".join(block.text for block in blocks)


def _chat_reply(body: bytes) -> str:
    answer = msgspec.json.decode(body, type=_Chat)
    return "".join(choice.message.content or "" for choice in answer.choices[:1])


def _chat_delta(event: bytes) -> str:
    chunk = msgspec.json.decode(event, type=_Chat)
    return "".join(choice.delta.content or "" for choice in chunk.choices[:1])


def _messages_reply(body: bytes) -> str:
    return _joined(b for b in msgspec.json.decode(body, type=_Message).content if b.type == "text")


def _messages_delta(event: bytes) -> str:
    found = msgspec.json.decode(event, type=_MessageEvent)
    return found.delta.text if found.type == "content_block_delta" else ""


def _responses_reply(body: bytes) -> str:
    return "".join(_joined(item.content) for item in msgspec.json.decode(body, type=_Response).output)


def _responses_delta(event: bytes) -> str:
    kind = msgspec.json.decode(event, type=_Event).type
    if kind != "response.output_text.delta":
        return ""
    return msgspec.json.decode(event, type=_ResponseEvent).delta


class _Event(msgspec.Struct):
    type: str = ""


CHAT = Dialect(path="/chat/completions", body=_chat_body, reply=_chat_reply, delta=_chat_delta)
RESPONSES = Dialect(path="/responses", body=_responses_body, reply=_responses_reply, delta=_responses_delta)
MESSAGES = Dialect(path="/v1/messages", body=_messages_body, reply=_messages_reply, delta=_messages_delta)
