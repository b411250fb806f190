"""Structs of the three protocols as the Arena's model gateway reads and writes them. Pure data; lenient where clients vary."""

from __future__ import annotations

import msgspec

Json = dict[str, object]


class Block(msgspec.Struct, kw_only=True, omit_defaults=True):
    """An Anthropic content block, or a part of a chat or Responses message: only the fields of its type are set."""

    type: str = "text"
    text: str = ""
    thinking: str = ""
    id: str = ""
    name: str = ""
    input: msgspec.Raw = msgspec.Raw(b"{}")
    tool_use_id: str = ""
    content: str | list[Block] | None = None
    is_error: bool = False


class AnthropicMessage(msgspec.Struct, kw_only=True):
    """One message of POST /v1/messages."""

    role: str
    content: str | list[Block]


class AnthropicTool(msgspec.Struct, kw_only=True):
    """A tool definition of the messages protocol."""

    name: str
    description: str = ""
    input_schema: msgspec.Raw = msgspec.Raw(b"{}")


class AnthropicChoice(msgspec.Struct, kw_only=True):
    """tool_choice of the messages protocol."""

    type: str = "auto"
    name: str = ""


class AnthropicRequest(msgspec.Struct, kw_only=True):
    """POST /v1/messages."""

    model: str
    messages: list[AnthropicMessage]
    system: str | list[Block] = ""
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stop_sequences: list[str] = []
    stream: bool = False
    tools: list[AnthropicTool] = []
    tool_choice: AnthropicChoice | None = None


class ResponseItem(msgspec.Struct, kw_only=True):
    """An input item of POST /v1/responses."""

    type: str = "message"
    role: str = ""
    content: str | list[Block] | None = None
    call_id: str = ""
    name: str = ""
    arguments: str = ""
    output: str | list[Block] = ""


class ResponseTool(msgspec.Struct, kw_only=True):
    """A tool definition of the Responses protocol."""

    type: str = "function"
    name: str = ""
    description: str | None = None
    parameters: msgspec.Raw = msgspec.Raw(b"{}")


class ResponsesRequest(msgspec.Struct, kw_only=True):
    """POST /v1/responses."""

    model: str
    input: str | list[ResponseItem]
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stream: bool = False
    tools: list[ResponseTool] = []
    tool_choice: str | Json | None = None


class ChatFunction(msgspec.Struct, kw_only=True):
    """The function part of a tool call; arguments are a JSON text, in pieces when streamed."""

    name: str | None = None
    arguments: str | None = None


class ChatToolCall(msgspec.Struct, kw_only=True):
    """A tool call, whole or as a piece of a stream."""

    index: int = 0
    id: str | None = None
    function: ChatFunction = msgspec.field(default_factory=ChatFunction)


class ChatMessage(msgspec.Struct, kw_only=True):
    """The answer of a chat completion, or a delta of it."""

    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ChatToolCall] | None = None


class ChatChoice(msgspec.Struct, kw_only=True):
    """One choice; only the first is used."""

    message: ChatMessage = msgspec.field(default_factory=ChatMessage)
    delta: ChatMessage = msgspec.field(default_factory=ChatMessage)
    finish_reason: str | None = None


class ChatUsage(msgspec.Struct, kw_only=True):
    """Token counts of a chat completion."""

    prompt_tokens: int = 0
    completion_tokens: int = 0


class ErrorDetail(msgspec.Struct, kw_only=True):
    """The error object of the OpenAI protocols."""

    message: str = ""
    type: str | None = None
    code: str | int | None = None


class ChatCompletion(msgspec.Struct, kw_only=True):
    """A whole chat completion, or one chunk of a streamed one."""

    id: str = ""
    choices: list[ChatChoice] = []
    usage: ChatUsage | None = None
    error: ErrorDetail | None = None


def text_of(content: str | list[Block] | None) -> str:
    """All text of a message's content, blocks joined."""
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(block.text for block in content)
