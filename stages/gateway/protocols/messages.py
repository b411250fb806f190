"""Anthropic messages: requests to calls, answers to bodies. Its streams are in `messages_stream`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import msgspec

from schemas.payload import digest
from stages.gateway.conversation import Answer, Call, Message, Requested, ToolCall, gather_system, new_answer_id
from stages.gateway.errors import InvalidRequestError
from stages.gateway.matching import parse_object
from stages.gateway.protocols.chat import positive
from stages.gateway.protocols.tool_choice import Chosen, chosen_tool, expect_tools, unknown_choice
from stages.gateway.protocols.wire import check_size, checked_tool, decode_body, not_served, refuse_media, to_json
from stages.gateway.settings import GatewayLimits

_BILLING: Final = "x-anthropic-billing-header:"
"""Claude Code puts a header with a changing checksum into its system text: nothing for the model, and it breaks prefixes."""
_CHOICES: Final = "an object of type auto, any, tool or none"
STOP_REASONS: Final = {
    "stop": "end_turn",
    "stop_string": "stop_sequence",
    "length": "max_tokens",
    "tool_calls": "tool_use",
}


_NO_INPUT: Final = msgspec.Raw(b"{}")


class Block(msgspec.Struct, omit_defaults=True):
    """A content block, whatever its type."""

    type: str
    text: str | None = None
    thinking: str | None = None
    signature: str | None = None
    data: str | None = None
    id: str | None = None
    name: str | None = None
    input: msgspec.Raw = _NO_INPUT
    tool_use_id: str | None = None
    content: str | list[Block] | None = None
    is_error: bool | None = None


class _Message(msgspec.Struct):
    role: str
    content: str | list[Block] | None = None


class _Tool(msgspec.Struct):
    name: str = ""
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, object] | None = None


class _ToolChoice(msgspec.Struct):
    type: str = "auto"
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class _Body(msgspec.Struct):
    messages: list[_Message]
    model: str = ""
    system: str | list[Block] | None = None
    max_tokens: int | None = None
    tools: list[_Tool] | None = None
    tool_choice: _ToolChoice | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None


_decoder: Final = msgspec.json.Decoder(_Body)


def parse_messages(body: bytes, limits: GatewayLimits, *, resumes: bool = False, sampled: bool = False) -> Call:
    """A request's body.

    Args:
        sampled: an answer is sampled, not only its prompt counted.
        resumes: the messages go on after an answer: those before were cut out, and the outer system text with them.

    Raises:
        InvalidRequestError: it can't be used.
    """
    request = decode_body(_decoder, body)
    check_size(len(request.messages), limits)
    if sampled and request.messages[-1].role == "assistant":
        raise not_served(
            "messages that end with the assistant's (a prefill)",
            "end with a user's message and ask there for how the answer begins",
        )
    choice = request.tool_choice
    chosen = _chosen(choice, [tool.name for tool in request.tools or ()])
    requested = Requested(
        max_tokens=positive(request.max_tokens),
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        stop=tuple(request.stop_sequences or ()),
        tool_choice=chosen.choice,
        parallel_tool_calls=not choice.disable_parallel_tool_use if choice else None,
    )
    system = _system(request.system)
    outer = [Message(role="system", texts=(text,)) for text in system] if not resumes else []
    elements = [list(_messages(message)) for message in request.messages]
    messages = [*outer, *(one for element in elements for one in element)]
    return Call(
        protocol="messages",
        answer_id=new_answer_id("messages"),
        model=request.model,
        messages=gather_system(messages, answered=resumes),
        outer_system=system,
        num_last=len(elements[-1]),
        tools=tuple(
            checked_tool(one.name, one.description, one.input_schema, limits)
            for one in request.tools or ()
            if one.input_schema is not None  # the others are run by Anthropic's own servers
        ),
        requested=requested,
        stream=bool(request.stream),
    )


def _chosen(choice: _ToolChoice | None, tools: Sequence[str]) -> Chosen:
    if choice is None:
        return Chosen()
    match choice.type:
        case "auto" | "none":
            return Chosen(choice=choice.type)
        case "any":
            expect_tools("any", tools)
            return Chosen(choice="required")
        case "tool":
            if not choice.name:
                raise InvalidRequestError('tool_choice: expected {"type": "tool", "name": …}, found no name of a tool')
            return chosen_tool(choice.name, tools)
        case other:
            raise unknown_choice(_CHOICES, other)


def _system(system: str | list[Block] | None) -> tuple[str, ...]:
    texts = [system] if isinstance(system, str) else [_text(block) for block in system or ()]
    return tuple(text for text in texts if not text.startswith(_BILLING))


def _messages(message: _Message) -> Iterator[Message]:
    blocks = [Block(type="text", text=message.content)] if isinstance(message.content, str) else message.content or []
    match message.role:
        case "assistant":
            yield _assistant(blocks)
        case "user":
            yield from (_result(block) for block in blocks if block.type == "tool_result")
            texts = tuple(_text(block) for block in blocks if block.type != "tool_result")
            if texts or not blocks:
                yield Message(role="user", texts=texts)
        case "system":
            yield Message(role="system", texts=tuple(_text(block) for block in blocks))
        case other:
            raise InvalidRequestError(f"messages: expected a role of user, assistant or system, found {other!r}")


def _assistant(blocks: Sequence[Block]) -> Message:
    seen = ("thinking", "redacted_thinking", "tool_use")
    return Message(
        role="assistant",
        texts=tuple(_text(block) for block in blocks if block.type not in seen),
        reasoning="".join(block.thinking or "" for block in blocks if block.type == "thinking"),
        calls=tuple(
            ToolCall(id=block.id or "", name=block.name or "", arguments=_arguments(block.input))
            for block in blocks
            if block.type == "tool_use"
        ),
    )


def _arguments(given: msgspec.Raw) -> str:
    text = bytes(given).decode()
    return "{}" if text == "null" else text


def _result(block: Block) -> Message:
    content = block.content
    texts = (content,) if isinstance(content, str) else tuple(_text(one) for one in content or ())
    return Message(role="tool", texts=texts, call_id=block.tool_use_id or "", is_error=bool(block.is_error))


def _text(block: Block) -> str:
    if block.text is not None:
        return block.text
    if block.type in ("image", "document", "audio", "video", "file"):
        raise refuse_media(block.type)
    # Blocks of a kind that is not known (search results, references …) reach the model as they are.
    return to_json(block).decode()


def to_blocks(message: Message) -> list[dict[str, object]]:
    """An internal message's content as Anthropic's blocks."""
    blocks: list[dict[str, object]] = []
    if message.role == "tool":
        content = [{"type": "text", "text": text} for text in message.texts]
        result: dict[str, object] = {"type": "tool_result", "tool_use_id": message.call_id, "content": content}
        if message.is_error:
            result["is_error"] = True
        return [result]
    if message.reasoning:
        blocks.append(thinking_block(message.reasoning))
    blocks.extend({"type": "text", "text": text} for text in message.texts)
    blocks.extend(tool_use_block(call) for call in message.calls)
    return blocks


def to_conversation(messages: Sequence[Message]) -> dict[str, object]:
    """An internal conversation as `system` and `messages` of a request."""
    shaped: list[dict[str, object]] = []
    system: list[dict[str, object]] = []
    for message in messages:
        role = "assistant" if message.role == "assistant" else "user"
        blocks = to_blocks(message)
        if message.role == "system":
            system += blocks
        elif message.role == "tool" and shaped and _holds_results(shaped[-1]):
            shaped[-1] = {"role": "user", "content": [*_content(shaped[-1]), *blocks]}
        else:
            shaped.append({"role": role, "content": blocks})
    return {"system": system, "messages": shaped}


def _holds_results(message: dict[str, object]) -> bool:
    return message["role"] == "user" and all(block["type"] == "tool_result" for block in _content(message))


def _content(message: dict[str, object]) -> list[dict[str, object]]:
    content = message["content"]
    assert isinstance(content, list)  # noqa: S101 - made above
    return content  # pyright: ignore[reportUnknownVariableType] - made above


def thinking_block(reasoning: str) -> dict[str, object]:
    """Reasoning, signed with its digest."""
    return {"type": "thinking", "thinking": reasoning, "signature": signature(reasoning)}


def signature(reasoning: str) -> str:
    """What clients send back with unchanged reasoning."""
    return digest(reasoning.encode("utf-8", "surrogatepass"))


def tool_use_block(call: ToolCall) -> dict[str, object]:
    """A tool call with parsed input."""
    value = parse_object(call.arguments)
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": {} if value is None else value}


def answer_blocks(answer: Answer) -> list[dict[str, object]]:
    """An answer's content in the order in which it was sampled: the same as its stream's blocks."""
    blocks: list[dict[str, object]] = []
    for kind, value in answer.segments:
        match kind:
            case "reasoning":
                blocks.append(thinking_block(value))
            case "text":
                blocks.append({"type": "text", "text": value})
            case _:
                blocks.append(tool_use_block(answer.message.calls[int(value)]))
    return blocks


def usage(answer: Answer) -> dict[str, object]:
    """Token counts."""
    return {
        "input_tokens": answer.num_prompt - answer.num_cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": answer.num_cached,
        "output_tokens": answer.num_completion,
    }
