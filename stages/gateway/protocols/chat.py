"""OpenAI chat completions: requests to calls. Their answers and streams are in `chat_stream`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

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
from stages.gateway.protocols.chat_stream import ChatExchange
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
    "tool": "tool",
    "function": "tool",
}
_CHOICES: Final = "none, auto, required or an object of type function or allowed_tools"


class _Part(msgspec.Struct):
    type: str
    text: str | None = None
    refusal: str | None = None


class _Function(msgspec.Struct):
    name: str = ""
    arguments: str | dict[str, object] | None = None


class _ToolCall(msgspec.Struct):
    id: str | None = None
    function: _Function | None = None


class _Message(msgspec.Struct):
    role: str
    content: str | list[_Part] | None = None
    tool_calls: list[_ToolCall] | None = None
    tool_call_id: str | None = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    function_call: str | dict[str, object] | None = None


class _FunctionSchema(msgspec.Struct):
    name: str
    description: str | None = None
    parameters: dict[str, object] | None = None


class _Tool(msgspec.Struct):
    type: str = "function"
    function: _FunctionSchema | None = None


class _StreamOptions(msgspec.Struct):
    include_usage: bool = False


class _Named(msgspec.Struct):
    name: str = ""


class _Entry(msgspec.Struct):
    type: str = "function"
    function: _Named | None = None


class _Allowed(msgspec.Struct):
    mode: str = ""
    tools: list[_Entry] = []


class _ToolChoice(_Entry):
    allowed_tools: _Allowed | None = None


class _Format(msgspec.Struct):
    type: str = "text"


class _Body(msgspec.Struct):
    messages: list[_Message]
    model: str = ""
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    tools: list[_Tool] | None = None
    tool_choice: str | _ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    n: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    modalities: list[str] | None = None
    audio: dict[str, object] | None = None
    response_format: _Format | None = None
    functions: list[object] | None = None
    function_call: str | dict[str, object] | None = None


_decoder: Final = msgspec.json.Decoder(_Body)


def parse_chat(body: bytes, limits: GatewayLimits, *, resumes: bool = False) -> ChatExchange:
    """A request's body.

    Args:
        resumes: the messages go on after an answer: those before were cut out.

    Raises:
        InvalidRequestError: it can't be used.
    """
    request = decode_body(_decoder, body)
    check_size(len(request.messages), limits)
    _check_served(request)
    tools = _tools(request.tools, limits)
    chosen = _chosen(request.tool_choice, [tool.name for tool in tools])
    requested = Requested(
        max_tokens=positive(
            request.max_completion_tokens if request.max_completion_tokens is not None else request.max_tokens
        ),
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        min_p=request.min_p,
        presence_penalty=request.presence_penalty,
        frequency_penalty=request.frequency_penalty,
        repetition_penalty=request.repetition_penalty,
        logit_bias=request.logit_bias,
        seed=request.seed,
        stop=stop_strings(request.stop),
        n=positive(request.n) or 1,
        logprobs=bool(request.logprobs),
        tool_choice=chosen.choice,
        allowed_tools=chosen.allowed,
        parallel_tool_calls=request.parallel_tool_calls,
        response_format=check_format("response_format", request.response_format.type)
        if request.response_format
        else None,
    )
    call = Call(
        protocol="chat_completions",
        answer_id=new_answer_id("chat_completions"),
        model=request.model,
        messages=gather_system((_message(one) for one in request.messages), answered=resumes),
        num_last=1,
        tools=tools,
        requested=requested,
        stream=bool(request.stream),
    )
    return ChatExchange(call, include_usage=bool(request.stream_options and request.stream_options.include_usage))


def _check_served(request: _Body) -> None:
    if request.functions:
        raise not_served("functions", "send them as tools")
    if request.function_call is not None:
        raise not_served("function_call", "send tools and tool_choice")
    if request.top_logprobs:
        raise not_served(
            f"top_logprobs of {request.top_logprobs}",
            "engines tell the log-prob of the sampled token alone: send logprobs without top_logprobs",
        )
    if request.modalities not in (None, ["text"]):
        raise not_served(f"modalities {request.modalities}", 'the policy answers with text: send ["text"] or none')
    if request.audio is not None:
        raise not_served("audio", "the policy answers with text: leave it out")


def _chosen(choice: str | _ToolChoice | None, tools: Sequence[str]) -> Chosen:
    match choice:
        case None:
            return Chosen()
        case str():
            return chosen_word(choice, tools, _CHOICES)
        case _ToolChoice(type="function"):
            return chosen_tool(_entry(choice), tools)
        case _ToolChoice(type="allowed_tools"):
            allowed = choice.allowed_tools or _Allowed()
            return chosen_of_allowed(allowed.mode, [_entry(one) for one in allowed.tools], tools)
        case _:
            raise unknown_choice(_CHOICES, choice.type)


def _entry(entry: _Entry) -> str:
    if entry.function is None or not entry.function.name:
        raise InvalidRequestError(
            'tool_choice: expected {"type": "function", "function": {"name": …}}, found no name of a function'
        )
    return entry.function.name


def positive(number: int | None) -> int | None:
    """A count that was given.

    Raises:
        InvalidRequestError: it is 0 or less.
    """
    if number is not None and number < 1:
        raise InvalidRequestError(f"expected a count of at least 1, found {number}")
    return number


def stop_strings(stop: str | list[str] | None) -> tuple[str, ...]:
    """The given stop strings, however they were given."""
    return (stop,) if isinstance(stop, str) else tuple(stop or ())


def _tools(tools: list[_Tool] | None, limits: GatewayLimits) -> tuple[Tool, ...]:
    functions = [_function(tool) for tool in tools or ()]
    return tuple(checked_tool(one.name, one.description, one.parameters, limits) for one in functions)


def _function(tool: _Tool) -> _FunctionSchema:
    if tool.type != "function":
        instead = "describe it as a function, a free-form one by a single string parameter"
        raise not_served(f"tools of type {tool.type!r}", instead)
    if tool.function is None:
        raise InvalidRequestError('tools: expected {"type": "function", "function": {…}}, found no function')
    return tool.function


def _message(message: _Message) -> Message:
    role = _ROLES.get(message.role)
    if role is None:
        raise InvalidRequestError(f"messages: expected a role of {', '.join(_ROLES)}, found {message.role!r}")
    if message.function_call is not None:
        raise not_served("messages: function_call", "send the call as tool_calls and its result with role tool")
    return Message(
        role=role,
        texts=_texts(message.content),
        reasoning=(message.reasoning_content or message.reasoning or "") if role == "assistant" else "",
        calls=tuple(_call(one) for one in message.tool_calls or ()) if role == "assistant" else (),
        call_id=(message.tool_call_id or message.name or "") if role == "tool" else "",
    )


def _texts(content: str | list[_Part] | None) -> tuple[str, ...]:
    if content is None:
        return ()
    if isinstance(content, str):
        return (content,)
    return tuple(_part(one) for one in content)


def _part(part: _Part) -> str:
    if part.text is not None:
        return part.text
    if part.refusal is not None:
        return part.refusal
    raise refuse_media(part.type)


def _call(call: _ToolCall) -> ToolCall:
    function = call.function or _Function()
    arguments = function.arguments
    text = arguments if isinstance(arguments, str) else to_json(arguments or {}).decode()
    return ToolCall(id=call.id or "", name=function.name, arguments=text or "{}")
