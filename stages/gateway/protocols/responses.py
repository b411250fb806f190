"""OpenAI responses: requests to calls. Its answers and streams are in `responses_stream`.

The policy knows functions only. Codex's namespaces become a prefix of the function's name, its custom (free-form) tools a function with one
text; `ToolNames` remembers which is which for the way back. Tools that OpenAI's own servers run are left out.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, Literal

import msgspec

from stages.gateway.conversation import (
    Call,
    Message,
    Requested,
    Role,
    Tool,
    ToolCall,
    gather_system,
    new_answer_id,
)
from stages.gateway.errors import InvalidRequestError
from stages.gateway.matching import parse_object
from stages.gateway.protocols.chat import positive
from stages.gateway.protocols.tool_choice import Chosen, chosen_of_allowed, chosen_tool, chosen_word, unknown_choice
from stages.gateway.protocols.wire import (
    check_format,
    check_size,
    checked_tool,
    decode_body,
    not_served,
    refuse_media,
    to_json,
)
from stages.gateway.settings import GatewayLimits

_ROLES: Final[dict[str, Role]] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
}
_SEALED: Final = "hr1:"
"""Before the reasoning inside encrypted_content: ours, and not secret from whoever sampled it."""
_LOGPROBS: Final = "message.output_text.logprobs"
_CHOICES: Final = "none, auto, required or an object of type function, custom, allowed_tools or of one of the tools"
_FUNCTIONS: Final = ("function", "custom")
_FREE_FORM: Final[dict[str, object]] = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
}


class ToolName(msgspec.Struct, frozen=True):
    """What a function of the policy is to the client."""

    kind: Literal["function", "custom"]
    name: str
    namespace: str | None = None


class _Part(msgspec.Struct):
    type: str
    text: str | None = None
    refusal: str | None = None


class _Item(msgspec.Struct):
    type: str = "message"
    role: str | None = None
    content: str | list[_Part] | None = None
    summary: list[_Part] | None = None
    encrypted_content: str | None = None
    call_id: str | None = None
    id: str | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: str | None = None
    input: str | None = None
    output: str | list[_Part] | None = None


class _Tool(msgspec.Struct):
    type: str = "function"
    name: str = ""
    description: str | None = None
    parameters: dict[str, object] | None = None
    tools: list[_Tool] | None = None


class _Entry(msgspec.Struct):
    type: str = "function"
    name: str | None = None
    namespace: str | None = None


class _ToolChoice(_Entry):
    mode: str = ""
    tools: list[_Entry] = []


class _Format(msgspec.Struct):
    type: str = "text"


class _TextOptions(msgspec.Struct):
    format: _Format | None = None


class _Body(msgspec.Struct):
    input: str | list[_Item]
    model: str = ""
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: list[_Tool] | None = None
    tool_choice: str | _ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stream: bool | None = None
    store: bool | None = None
    include: list[str] | None = None
    text: _TextOptions | None = None
    background: bool | None = None
    conversation: str | dict[str, object] | None = None
    prompt: dict[str, object] | None = None
    top_logprobs: int | None = None


_decoder: Final = msgspec.json.Decoder(_Body)


class ResponsesRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A parsed request."""

    call: Call
    names: dict[str, ToolName]
    """The policy's function names → what the client calls them."""
    previous: str | None
    store: bool
    sealed: bool
    """The client wants reasoning as encrypted_content."""
    instructions: str | None


def parse_responses(
    body: bytes, limits: GatewayLimits, previous: Mapping[str, tuple[Message, ...]], *, resumes: bool = False
) -> ResponsesRequest:
    """A request's body.

    Args:
        previous: the conversations that `previous_response_id` may name.
        resumes: the items go on after an input: those before were cut out, and the instructions with them.

    Raises:
        InvalidRequestError: it can't be used.
    """
    request = decode_body(_decoder, body)
    _check_served(request)
    items = [_Item(role="user", content=request.input)] if isinstance(request.input, str) else request.input
    check_size(len(items), limits)
    before = _before(request.previous_response_id, previous)
    outer = (request.instructions,) if request.instructions else ()
    instructions = [] if resumes else [Message(role="system", texts=(text,)) for text in outer]
    # A response that is kept for previous_response_id needs its whole conversation.
    alone = request.store is False and request.previous_response_id is None
    can_resume = alone and not isinstance(request.input, str) and not _is_answer(items[-1])
    tools, names = _tools(request.tools or [], limits)
    chosen = _chosen(request.tool_choice, request.tools or [], names)
    call = Call(
        protocol="responses",
        answer_id=new_answer_id("responses"),
        model=request.model,
        messages=gather_system([*instructions, *before, *_messages(items)], answered=resumes),
        outer_system=outer,
        num_last=1 if can_resume else 0,
        tools=tools,
        requested=Requested(
            max_tokens=positive(request.max_output_tokens),
            temperature=request.temperature,
            top_p=request.top_p,
            tool_choice=chosen.choice,
            allowed_tools=chosen.allowed,
            parallel_tool_calls=request.parallel_tool_calls,
            response_format=check_format("text.format", request.text.format.type)
            if request.text and request.text.format
            else None,
        ),
        stream=bool(request.stream),
    )
    return ResponsesRequest(
        call=call,
        names=names,
        previous=request.previous_response_id,
        store=request.store is not False,
        sealed="reasoning.encrypted_content" in (request.include or ()),
        instructions=request.instructions,
    )


def _check_served(request: _Body) -> None:
    if request.background:
        raise not_served("background", "leave it out")
    if request.conversation is not None:
        raise not_served("conversation", "send the whole input, or previous_response_id")
    if request.prompt is not None:
        raise not_served("prompt", "stored prompts are not kept here: send instructions and input")
    if request.top_logprobs or _LOGPROBS in (request.include or ()):
        raise not_served(
            "log-probs of responses", "ask for them with logprobs at /v1/chat/completions or /v1/completions"
        )


def _before(response_id: str | None, previous: Mapping[str, tuple[Message, ...]]) -> tuple[Message, ...]:
    if response_id is None:
        return ()
    if response_id not in previous:
        raise InvalidRequestError(
            f"previous_response_id: {response_id!r} is not known to this session; send the whole input instead"
        )
    # Instructions of a former response do not carry over.
    return tuple(message for message in previous[response_id] if message.role != "system")


def _tools(tools: Sequence[_Tool], limits: GatewayLimits) -> tuple[tuple[Tool, ...], dict[str, ToolName]]:
    made: list[Tool] = []
    names: dict[str, ToolName] = {}
    for tool in tools:
        inner = [(None, tool)] if tool.type != "namespace" else [(tool.name, one) for one in tool.tools or ()]
        for namespace, one in inner:
            if one.type not in _FUNCTIONS:
                continue
            name = one.name if namespace is None else _qualified(namespace, one.name)
            parameters = _FREE_FORM if one.type == "custom" else one.parameters
            made.append(checked_tool(name, one.description, parameters, limits))
            names[name] = ToolName("custom" if one.type == "custom" else "function", one.name, namespace)
    return tuple(made), names


def _chosen(choice: str | _ToolChoice | None, tools: Sequence[_Tool], names: Mapping[str, ToolName]) -> Chosen:
    not_served_types = [tool.type for tool in tools if tool.type not in (*_FUNCTIONS, "namespace")]
    known = [*names, *not_served_types]
    match choice:
        case None:
            return Chosen()
        case str():
            return chosen_word(choice, known, _CHOICES)
        case _ToolChoice(type="allowed_tools"):
            return chosen_of_allowed(choice.mode, [_policy_name(one, names) for one in choice.tools], known)
        case _ToolChoice(type="function" | "custom"):
            return chosen_tool(_policy_name(choice, names), known)
        case _ if choice.type in not_served_types:
            return Chosen(choice=choice.type)
        case _:
            raise unknown_choice(_CHOICES, choice.type)


def _policy_name(entry: _Entry, names: Mapping[str, ToolName]) -> str:
    """What the policy calls a tool that a choice names; a tool that is not served goes by its type."""
    if entry.type not in _FUNCTIONS:
        return entry.type
    if not entry.name:
        raise InvalidRequestError(f"tool_choice: expected a name beside type {entry.type!r}, found none")
    for known, tool in names.items():
        if (tool.kind, tool.name) == (entry.type, entry.name) and entry.namespace in (None, tool.namespace):
            return known
    return entry.name


def _qualified(namespace: str, name: str) -> str:
    return f"{namespace}__{name}"


def _messages(items: Sequence[_Item]) -> Iterator[Message]:
    """Items to messages: what the model said between two inputs is one answer."""
    answer: list[_Item] = []
    for item in items:
        if _is_answer(item):
            answer.append(item)
            continue
        if answer:
            yield _answer(answer)
            answer = []
        yield _input(item)
    if answer:
        yield _answer(answer)


def _is_answer(item: _Item) -> bool:
    said = item.type in ("reasoning", "function_call", "custom_tool_call")
    return said or (item.type == "message" and item.role == "assistant")


def _answer(items: Sequence[_Item]) -> Message:
    return Message(
        role="assistant",
        texts=tuple(text for item in items if item.type == "message" for text in _texts(item.content)),
        reasoning="".join(_reasoning(item) for item in items if item.type == "reasoning"),
        calls=tuple(_call(item) for item in items if item.type in ("function_call", "custom_tool_call")),
    )


def _input(item: _Item) -> Message:
    match item.type:
        case "message":
            role = _ROLES.get(item.role or "")
            if role is None:
                raise InvalidRequestError(f"input: expected a role of {', '.join(_ROLES)}, found {item.role!r}")
            return Message(role=role, texts=_texts(item.content))
        case "function_call_output" | "custom_tool_call_output":
            return Message(role="tool", texts=_texts(item.output), call_id=item.call_id or "")
        case other:
            raise InvalidRequestError(f"input: items of type {other!r} can't be used")


def _call(item: _Item) -> ToolCall:
    name = item.name or ""
    if item.type == "custom_tool_call":
        arguments = to_json({"input": item.input or ""}).decode()
    else:
        arguments = item.arguments or "{}"
    return ToolCall(
        id=item.call_id or "", name=_qualified(item.namespace, name) if item.namespace else name, arguments=arguments
    )


def free_form_input(call: ToolCall) -> str:
    """The text of a custom tool's call."""
    value = (parse_object(call.arguments) or {}).get("input")
    return value if isinstance(value, str) else call.arguments


def _reasoning(item: _Item) -> str:
    sealed = unseal(item.encrypted_content)
    if sealed is not None:
        return sealed
    parts = item.content if isinstance(item.content, list) and item.content else item.summary or []
    return "".join(part.text or "" for part in parts)


def seal(reasoning: str) -> str:
    """Reasoning as encrypted_content."""
    return _SEALED + base64.b64encode(reasoning.encode("utf-8", "surrogatepass")).decode()


def unseal(sealed: str | None) -> str | None:
    """The reasoning inside our own encrypted_content, or None."""
    if sealed is None or not sealed.startswith(_SEALED):
        return None
    try:
        return base64.b64decode(sealed[len(_SEALED) :]).decode("utf-8", "surrogatepass")
    except (binascii.Error, UnicodeDecodeError):
        return None


def _texts(content: str | list[_Part] | None) -> tuple[str, ...]:
    if content is None:
        return ()
    if isinstance(content, str):
        return (content,)
    return tuple(_part(one) for one in content)


def _part(part: _Part) -> str:
    text = part.text if part.text is not None else part.refusal
    if text is None:
        raise refuse_media(part.type)
    return text
