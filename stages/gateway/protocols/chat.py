"""OpenAI chat completions."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

import msgspec

from stages.gateway.conversation import (
    Answer,
    Call,
    CallArguments,
    CallStarted,
    Event,
    Message,
    Reasoning,
    Requested,
    Role,
    Text,
    Tool,
    ToolCall,
    gather_system,
    new_answer_id,
)
from stages.gateway.errors import GatewayError, InvalidRequestError
from stages.gateway.protocols.wire import (
    PING_COMMENT,
    check_format,
    check_size,
    checked_tool,
    decode_body,
    not_served,
    openai_error,
    refuse_media,
    sse,
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
FINISH: Final = {"stop": "stop", "stop_string": "stop", "length": "length", "tool_calls": "tool_calls"}


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


class _ToolChoice(msgspec.Struct):
    type: str = "function"
    function: _Named | None = None


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
    if request.functions:
        raise not_served("functions", "send them as tools")
    if request.function_call is not None:
        raise not_served("function_call", "send tools and tool_choice")
    choice = request.tool_choice
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
        tool_choice=choice if choice is None or isinstance(choice, str) else (choice.function or _Named()).name,
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
        tools=_tools(request.tools, limits),
        requested=requested,
        stream=bool(request.stream),
    )
    return ChatExchange(call, include_usage=bool(request.stream_options and request.stream_options.include_usage))


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


def usage(answers: Sequence[Answer]) -> dict[str, object]:
    """Token counts of a call with all its choices."""
    num_prompt = answers[0].num_prompt
    num_completion = sum(answer.num_completion for answer in answers)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_completion,
        "total_tokens": num_prompt + num_completion,
        "prompt_tokens_details": {"cached_tokens": answers[0].num_cached},
    }


def _logprobs(answer: Answer) -> dict[str, object] | None:
    if not answer.token_logprobs:
        return None
    return {
        "content": [
            {"token": text, "logprob": logprob, "bytes": list(text.encode("utf-8", "replace")), "top_logprobs": []}
            for text, logprob in answer.token_logprobs
        ],
        "refusal": None,
    }


class ChatExchange:
    """One chat completion."""

    def __init__(self, call: Call, *, include_usage: bool) -> None:
        self.call = call
        self._include_usage = include_usage
        self._created: Final = int(time.time())
        head = {"id": call.answer_id, "object": "chat.completion.chunk", "created": self._created, "model": call.model}
        self._head: Final = to_json(head)[:-1]

    def reply(self, answers: Sequence[Answer]) -> bytes:
        """The body of a non-streaming answer."""
        return to_json(
            {
                "id": self.call.answer_id,
                "object": "chat.completion",
                "created": self._created,
                "model": self.call.model,
                "choices": [self._choice(index, answer) for index, answer in enumerate(answers)],
                "usage": usage(answers),
            }
        )

    def _choice(self, index: int, answer: Answer) -> dict[str, object]:
        message = answer.message
        shaped: dict[str, object] = {"role": "assistant", "content": message.text or (None if message.calls else "")}
        if message.reasoning:
            shaped["reasoning_content"] = message.reasoning
        if message.calls:
            shaped["tool_calls"] = [
                {"id": one.id, "type": "function", "function": {"name": one.name, "arguments": one.arguments}}
                for one in message.calls
            ]
        return {
            "index": index,
            "message": shaped,
            "finish_reason": FINISH[answer.finish],
            "logprobs": _logprobs(answer),
        }

    def start(self) -> bytes:
        """Each choice begins with its role."""
        choices = range(self.call.requested.n)
        return b"".join(self._chunk(choice, b'{"role":"assistant","content":""}') for choice in choices)

    def events(self, choice: int, events: Sequence[Event]) -> bytes:
        """One chunk per event."""
        if len(events) == 1:
            return self._chunk(choice, _delta(events[0]))
        return b"".join(self._chunk(choice, _delta(event)) for event in events)

    def finish(self, answers: Sequence[Answer]) -> bytes:
        """Finish reasons, usage where asked for, the end mark."""
        chunks = [
            b'data: %b,"choices":[%b]}\n\n'
            % (
                self._head,
                to_json(
                    {"index": index, "delta": {}, "logprobs": _logprobs(answer), "finish_reason": FINISH[answer.finish]}
                ),
            )
            for index, answer in enumerate(answers)
        ]
        if self._include_usage:
            chunks.append(b'data: %b,"choices":[],"usage":%b}\n\n' % (self._head, to_json(usage(answers))))
        return b"".join(chunks) + b"data: [DONE]\n\n"

    def fail(self, error: GatewayError) -> bytes:
        """An error chunk: the SDK raises it."""
        return sse(None, to_json(openai_error(error)))

    def ping(self) -> bytes:
        """A comment: an unknown event would reach users as a chunk without choices."""
        return PING_COMMENT

    def _chunk(self, choice: int, delta: bytes) -> bytes:
        return b'data: %b,"choices":[{"index":%d,"delta":%b,"logprobs":null,"finish_reason":null}]}\n\n' % (
            self._head,
            choice,
            delta,
        )


def _delta(event: Event) -> bytes:
    match event:
        case Text(text):
            return b'{"content":%b}' % to_json(text)
        case Reasoning(text):
            return b'{"reasoning_content":%b}' % to_json(text)
        case CallStarted(index, call_id, name):
            function = {"name": name, "arguments": ""}
            return to_json({"tool_calls": [{"index": index, "id": call_id, "type": "function", "function": function}]})
        case CallArguments(index, text):
            return to_json({"tool_calls": [{"index": index, "function": {"arguments": text}}]})
