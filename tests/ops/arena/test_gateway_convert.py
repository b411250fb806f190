"""Protocol conversion of the Arena's model gateway, and its streams, without a server."""

import json

import msgspec
import pytest

from ops.arena.gateway_convert import (
    chat_from_messages,
    chat_from_responses,
    chat_request,
    error_body,
    messages_answer,
    responses_answer,
)
from ops.arena.gateway_stream import MessagesStream, ResponsesStream
from ops.arena.gateway_wire import AnthropicRequest, ChatCompletion, ErrorDetail, ResponsesRequest


def _json(value):
    return json.loads(msgspec.json.encode(value))


def _messages(**fields):
    request = msgspec.json.decode(json.dumps({"model": "m", "max_tokens": 9, **fields}), type=AnthropicRequest)
    return _json(chat_from_messages(request, "policy"))


def _responses(**fields):
    request = msgspec.json.decode(json.dumps({"model": "m", **fields}), type=ResponsesRequest)
    return _json(chat_from_responses(request, "policy"))


def _completion(message, finish="stop"):
    usage = {"prompt_tokens": 4, "completion_tokens": 2, "total_tokens": 6}
    body = {"id": "c7", "choices": [{"index": 0, "message": message, "finish_reason": finish}], "usage": usage}
    return msgspec.json.decode(json.dumps(body), type=ChatCompletion)


TOOL_CALL = {"id": "weird id-3", "type": "function", "function": {"name": "sh", "arguments": '{"a":  1}'}}


def test_a_chat_request_passes_byte_for_byte_but_for_its_model() -> None:
    body = b'{"model":"m","messages":[{"role":"user","content":"x"}],"odd":{"b": 1.50},"seed":7}'
    assert msgspec.json.encode(chat_request(body, "policy")) == body.replace(b'"m"', b'"policy"')


def test_an_anthropic_request_becomes_chat() -> None:
    chat = _messages(
        system=[{"type": "text", "text": "be "}, {"type": "text", "text": "brief", "cache_control": {"type": "ephemeral"}}],
        messages=[{"role": "user", "content": "hi"}, {"role": "assistant", "content": [{"type": "text", "text": "yo"}]}],
        temperature=0.5, top_p=0.9, stop_sequences=["X"],
    )  # fmt: skip
    assert chat == {
        "model": "policy",
        "messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}],
        "max_tokens": 9, "temperature": 0.5, "top_p": 0.9, "stop": ["X"],
    }  # fmt: skip


def test_anthropic_tool_use_and_results_become_tool_calls_and_tool_messages() -> None:
    use = {"type": "tool_use", "id": "t1", "name": "sh", "input": {"cmd": "ls"}}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "a b"}]}
    chat = _messages(
        messages=[{"role": "assistant", "content": [{"type": "thinking", "thinking": "hm", "signature": "s"}, use]}, {"role": "user", "content": [result, {"type": "text", "text": "go on"}]}],
        tools=[{"name": "sh", "description": "d", "input_schema": {"type": "object"}}],
        tool_choice={"type": "any"},
    )  # fmt: skip
    assistant, tool, user = chat["messages"]
    assert assistant["content"] is None
    assert assistant["reasoning_content"] == "hm"
    assert assistant["tool_calls"][0]["function"] == {"name": "sh", "arguments": '{"cmd": "ls"}'}
    assert tool == {"role": "tool", "tool_call_id": "t1", "content": "a b"}
    assert user == {"role": "user", "content": "go on"}
    assert chat["tools"] == [
        {"type": "function", "function": {"name": "sh", "description": "d", "parameters": {"type": "object"}}}
    ]
    assert chat["tool_choice"] == "required"


def test_a_responses_request_becomes_chat() -> None:
    items = [
        {"role": "developer", "content": [{"type": "input_text", "text": "rules"}]},
        {"type": "message", "role": "user", "content": "hi"},
        {"type": "reasoning", "summary": []},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "wait"}]},
        {"type": "function_call", "call_id": "k1", "name": "sh", "arguments": "{}"},
        {"type": "function_call", "call_id": "k2", "name": "sh", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "k1", "output": "done"},
    ]
    chat = _responses(input=items, instructions="sys", max_output_tokens=5, stream=True, tool_choice="auto")
    roles = [message["role"] for message in chat["messages"]]
    assert roles == ["system", "system", "user", "assistant", "tool"]
    assert [call["id"] for call in chat["messages"][3]["tool_calls"]] == ["k1", "k2"]
    assert chat["messages"][3]["content"] == "wait"
    assert (chat["max_tokens"], chat["stream"], chat["tool_choice"]) == (5, True, "auto")
    assert _responses(input="just text")["messages"] == [{"role": "user", "content": "just text"}]


@pytest.mark.parametrize(
    ("choice", "becomes"),
    [
        ("required", "required"),
        ({"type": "function", "name": "sh"}, {"type": "function", "function": {"name": "sh"}}),
        ({"type": "function", "name": "ls"}, {"type": "function", "function": {"name": "ls"}}),  # refused further on
        ({"type": "web_search"}, None),
        (
            {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "sh"}, {"type": "web_search"}]},
            {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "sh"}}]}},
        ),
        ({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "web_search"}]}, "none"),
    ],
)  # fmt: skip
def test_a_choice_of_the_responses_protocol_names_only_tools_that_are_passed_on(choice, becomes) -> None:
    tools = [{"type": "function", "name": "sh", "parameters": {}}, {"type": "web_search"}]
    assert _responses(input="x", tools=tools, tool_choice=choice).get("tool_choice") == becomes
    assert "tool_choice" not in _responses(input="x", tools=tools[1:], tool_choice=choice)


def test_a_chat_answer_becomes_an_anthropic_message() -> None:
    answer = _json(messages_answer(_completion({"content": "\n hi ", "tool_calls": [TOOL_CALL]}, "tool_calls"), "m"))
    assert answer["content"][0] == {"type": "text", "text": "\n hi "}
    assert answer["content"][1] == {"type": "tool_use", "id": "weird id-3", "name": "sh", "input": {"a": 1}}
    assert (answer["stop_reason"], answer["usage"]) == ("tool_use", {"input_tokens": 4, "output_tokens": 2})
    assert messages_answer(_completion({"content": "x"}, "length"), "m")["stop_reason"] == "max_tokens"


def test_a_chat_answer_becomes_a_response() -> None:
    answer = _json(responses_answer(_completion({"content": "hi", "tool_calls": [TOOL_CALL]}, "tool_calls"), "m"))
    assert [item["type"] for item in answer["output"]] == ["message", "function_call"]
    assert answer["output"][1]["arguments"] == '{"a":  1}'
    assert answer["usage"]["total_tokens"] == 6
    cut = responses_answer(_completion({"content": "x"}, "length"), "m")
    assert (cut["status"], cut["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})


@pytest.mark.parametrize("protocol", ["chat_completions", "responses", "messages"])
def test_a_context_overflow_stays_readable_in_each_protocol(protocol) -> None:
    detail = ErrorDetail(message="too long", type="invalid_request_error", code="context_length_exceeded")
    error = _json(error_body(protocol, 400, detail))["error"]
    assert "context_length_exceeded" in (error.get("code"), error["type"])


def _events(converter, *deltas, finish="stop"):
    chunks = [{"id": "c7", "choices": [{"index": 0, "delta": delta}]} for delta in deltas]
    chunks.append(
        {
            "id": "c7",
            "choices": [{"index": 0, "delta": {}, "finish_reason": finish}],
            "usage": {"prompt_tokens": 4, "completion_tokens": 2},
        }
    )
    raw = b"".join(
        event
        for chunk in chunks
        for event in converter.feed(msgspec.json.decode(json.dumps(chunk), type=ChatCompletion))
    )
    raw += b"".join(converter.end())
    return [json.loads(line[6:]) for line in raw.decode().splitlines() if line.startswith("data: ")]


def _call(index, **function):
    return {"tool_calls": [{"index": index, "id": f"t{index}", "function": function}]}


def test_a_stream_becomes_anthropic_events_with_every_block_closed() -> None:
    events = _events(
        MessagesStream("m"), {"reasoning_content": "hm"}, {"content": "he"}, {"content": "y"},
        _call(0, name="sh", arguments='{"a"'), _call(0, arguments=":1}"), _call(1, name="ls", arguments="{}"), finish="tool_calls",
    )  # fmt: skip
    assert [event["type"] for event in events] == [
        "message_start", "content_block_start", "content_block_delta", "content_block_stop",
        "content_block_start", "content_block_delta", "content_block_delta", "content_block_stop",
        "content_block_start", "content_block_delta", "content_block_delta", "content_block_stop",
        "content_block_start", "content_block_delta", "content_block_stop", "message_delta", "message_stop",
    ]  # fmt: skip
    assert [e["index"] for e in events if e["type"] == "content_block_stop"] == [0, 1, 2, 3]
    assert events[-2]["delta"]["stop_reason"] == "tool_use"
    assert events[-2]["usage"]["output_tokens"] == 2


def test_a_stream_becomes_responses_events_that_end_with_whole_items() -> None:
    events = _events(ResponsesStream("m"), {"content": "he"}, {"content": "y"}, _call(0, name="sh", arguments="{}"))
    kinds = [event["type"] for event in events]
    assert kinds[0] == "response.created"
    assert kinds[-1] == "response.completed"
    output = events[-1]["response"]["output"]
    assert output[0]["content"][0]["text"] == "hey"
    assert (output[1]["call_id"], output[1]["name"]) == ("t0", "sh")
    assert events[-1]["response"]["usage"]["total_tokens"] == 6
    assert _events(ResponsesStream("m"), {"content": "x"}, finish="length")[-1]["type"] == "response.incomplete"


def test_a_broken_stream_ends_with_each_protocols_error_event() -> None:
    detail = ErrorDetail(message="gone", code="context_length_exceeded")
    assert b'"type":"error"' in b"".join(MessagesStream("m").fail(detail))
    assert b"response.failed" in b"".join(ResponsesStream("m").fail(detail))
    assert b"ping" in MessagesStream("m").ping()
    assert b"ping" in ResponsesStream("m").ping()
