"""Protocol conversion of the Arena's model gateway: requests to chat, chat answers back. Pure.

Streams are converted piece by piece by `ops.arena.gateway_stream`.
"""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from ops.arena.gateway_wire import (
    AnthropicMessage,
    AnthropicRequest,
    Block,
    ChatCompletion,
    ChatMessage,
    ErrorDetail,
    Json,
    ResponseItem,
    ResponsesRequest,
    text_of,
)

STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
"""Chat finish_reason → Anthropic stop_reason."""


def chat_request(body: bytes, upstream_model: str) -> Json:
    """A chat request with the upstream's model name; everything else stays byte for byte.

    Raises:
        msgspec.MsgspecError: The body is no JSON object.
    """
    fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    return {**fields, "model": upstream_model}


def chat_from_messages(request: AnthropicRequest, upstream_model: str) -> Json:
    """An Anthropic messages request as a chat request."""
    messages: list[Json] = []
    if system := text_of(request.system):
        messages.append({"role": "system", "content": system})
    for message in request.messages:
        messages.extend(_chat_messages(message))
    chat: Json = {"model": upstream_model, "messages": messages}
    _set(chat, "max_tokens", request.max_tokens)
    _set(chat, "temperature", request.temperature)
    _set(chat, "top_p", request.top_p)
    _set(chat, "stop", request.stop_sequences)
    _set(chat, "tools", [_chat_tool(t.name, t.description, t.input_schema) for t in request.tools])
    if request.tool_choice is not None:
        named: Json = {"type": "function", "function": {"name": request.tool_choice.name}}
        kinds: Json = {"auto": "auto", "any": "required", "none": "none", "tool": named}
        _set(chat, "tool_choice", kinds.get(request.tool_choice.type))
    return _with_stream(chat, request.stream)


def chat_from_responses(request: ResponsesRequest, upstream_model: str) -> Json:
    """A Responses request as a chat request."""
    messages: list[Json] = []
    if request.instructions:
        messages.append({"role": "system", "content": request.instructions})
    if isinstance(request.input, str):
        messages.append({"role": "user", "content": request.input})
    else:
        for item in request.input:
            _append_item(messages, item)
    chat: Json = {"model": upstream_model, "messages": messages}
    _set(chat, "max_tokens", request.max_output_tokens)
    _set(chat, "temperature", request.temperature)
    _set(chat, "top_p", request.top_p)
    functions = [tool for tool in request.tools if tool.type == "function"]
    _set(chat, "tools", [_chat_tool(t.name, t.description or "", t.parameters) for t in functions])
    if functions or not request.tools:  # else all tools that it may speak of were left out
        _set(chat, "tool_choice", _chat_choice(request.tool_choice, {tool.name for tool in functions}))
    return _with_stream(chat, request.stream)


def _chat_choice(choice: str | Json | None, functions: Collection[str]) -> str | Json | None:
    """A choice of the Responses protocol; None for one of tools that were left out."""
    if choice is None or isinstance(choice, str):
        return choice
    if choice.get("type") == "allowed_tools":
        named = [{"type": "function", "function": {"name": one}} for one in _names(choice) if one in functions]
        return (
            {"type": "allowed_tools", "allowed_tools": {"mode": choice.get("mode"), "tools": named}}
            if named
            else "none"
        )
    name = choice.get("name", "")
    return {"type": "function", "function": {"name": name}} if choice.get("type") == "function" else None


def _names(choice: Json) -> list[object]:
    tools: object = choice.get("tools")
    return [one.get("name") for one in tools if isinstance(one, dict)] if isinstance(tools, list) else []


def messages_answer(answer: ChatCompletion, model: str) -> Json:
    """A chat completion as an Anthropic message."""
    message, finish = _first(answer)
    content: list[Json] = []
    if message.reasoning_content:
        content.append({"type": "thinking", "thinking": message.reasoning_content, "signature": ""})
    if message.content:
        content.append({"type": "text", "text": message.content})
    for call in message.tool_calls or []:
        arguments = msgspec.Raw((call.function.arguments or "{}").encode())
        content.append({"type": "tool_use", "id": call.id or "", "name": call.function.name or "", "input": arguments})
    return {
        "id": f"msg_{answer.id}",
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": content,
        "stop_reason": STOP_REASONS.get(finish, "end_turn"),
        "stop_sequence": None,
        "usage": messages_usage(answer),
    }


def responses_answer(answer: ChatCompletion, model: str) -> Json:
    """A chat completion as a Response."""
    message, finish = _first(answer)
    output: list[Json] = []
    if message.content:
        output.append(message_item(f"msg_{answer.id}", message.content))
    calls = message.tool_calls or []
    output.extend(call_item(c.id or "", c.function.name or "", c.function.arguments or "") for c in calls)
    incomplete = finish == "length"
    return {
        "id": f"resp_{answer.id}",
        "object": "response",
        "model": model,
        "status": "incomplete" if incomplete else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if incomplete else None,
        "error": None,
        "output": output,
        "usage": responses_usage(answer),
    }


def message_item(item_id: str, text: str) -> Json:
    """A text output item of a Response."""
    part: Json = {"type": "output_text", "text": text, "annotations": []}
    return {"id": item_id, "type": "message", "role": "assistant", "status": "completed", "content": [part]}


def call_item(call_id: str, name: str, arguments: str) -> Json:
    """A function call output item of a Response."""
    return {
        "id": f"fc_{call_id}",
        "type": "function_call",
        "call_id": call_id,
        "name": name,
        "arguments": arguments,
        "status": "completed",
    }


def messages_usage(answer: ChatCompletion) -> Json:
    """Token counts in the Anthropic form."""
    usage = answer.usage
    return {
        "input_tokens": usage.prompt_tokens if usage else 0,
        "output_tokens": usage.completion_tokens if usage else 0,
    }


def responses_usage(answer: ChatCompletion) -> Json:
    """Token counts in the Responses form."""
    counts = messages_usage(answer)
    usage = answer.usage
    return {**counts, "total_tokens": usage.prompt_tokens + usage.completion_tokens if usage else 0}


def error_body(protocol: str, status: int, detail: ErrorDetail) -> Json:
    """An error in a protocol's own shape; `context_length_exceeded` stays readable in each."""
    if protocol == "messages":
        kinds = {400: "invalid_request_error", 401: "authentication_error", 403: "permission_error"}
        kinds |= {404: "not_found_error", 429: "rate_limit_error"}
        own = "context_length_exceeded" if detail.code == "context_length_exceeded" else kinds.get(status, "api_error")
        return {"type": "error", "error": {"type": own, "message": detail.message}}
    error = {"message": detail.message, "type": detail.type or "api_error", "param": None, "code": detail.code}
    return {"error": error}


def _chat_messages(message: AnthropicMessage) -> list[Json]:
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    results = [block for block in message.content if block.type == "tool_result"]
    found: list[Json] = [
        {"role": "tool", "tool_call_id": block.tool_use_id, "content": text_of(block.content)} for block in results
    ]
    text = "".join(block.text for block in message.content if block.type == "text")
    calls = [_chat_call(b) for b in message.content if b.type == "tool_use"]
    reasoning = "".join(block.thinking for block in message.content if block.type == "thinking")
    if text or calls or reasoning or not found:
        plain: Json = {"role": message.role, "content": text if text or not calls else None}
        _set(plain, "tool_calls", calls)
        _set(plain, "reasoning_content", reasoning)
        found.append(plain)
    return found


def _chat_call(block: Block) -> Json:
    return {
        "id": block.id,
        "type": "function",
        "function": {"name": block.name, "arguments": bytes(block.input).decode()},
    }


def _append_item(messages: list[Json], item: ResponseItem) -> None:
    match item.type:
        case "message":
            role = "system" if item.role == "developer" else item.role
            messages.append({"role": role, "content": text_of(item.content)})
        case "function_call":
            function = {"name": item.name, "arguments": item.arguments}
            call: Json = {"id": item.call_id, "type": "function", "function": function}
            last = messages[-1] if messages else {}
            calls = last.get("tool_calls")
            if last.get("role") == "assistant" and isinstance(calls, list):
                last["tool_calls"] = [*calls, call]
            elif last.get("role") == "assistant":
                last["tool_calls"] = [call]
            else:
                messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
        case "function_call_output":
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": text_of(item.output)})
        case _:  # reasoning and other items have no counterpart in chat
            return


def _chat_tool(name: str, description: str, parameters: msgspec.Raw) -> Json:
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def _first(answer: ChatCompletion) -> tuple[ChatMessage, str]:
    if not answer.choices:
        return ChatMessage(), "stop"
    return answer.choices[0].message, answer.choices[0].finish_reason or "stop"


def _with_stream(chat: Json, stream: bool) -> Json:
    if stream:
        chat["stream"] = True
        chat["stream_options"] = {"include_usage": True}
    return chat


def _set(target: Json, name: str, value: object) -> None:
    if value is not None and value not in ("", []):
        target[name] = value
