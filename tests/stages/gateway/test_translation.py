"""Protocols to the internal form and back: nothing is lost that the model sees, and streams say what bodies say."""

import msgspec
import pytest
from gateway_fakes import FakeEngine, house
from hypothesis import given, settings
from hypothesis import strategies as st

from stages.gateway.protocols.chat import parse_chat
from stages.gateway.protocols.messages import parse_messages, to_conversation
from stages.gateway.protocols.responses import parse_responses
from stages.gateway.settings import GatewayLimits

LIMITS = GatewayLimits()
TEXT = st.text(alphabet=st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12)
NAME = st.text(alphabet="abcXYZ_09", min_size=1, max_size=8)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAME, inner, max_size=3),
    max_leaves=6,
)
TEXT_BLOCK = st.builds(lambda text: {"type": "text", "text": text, "cache_control": {"type": "ephemeral"}}, TEXT)


@st.composite
def conversations(draw):
    """Anthropic conversations as clients send them: results of the calls first, then text."""
    messages, number = [], 0
    for _ in range(draw(st.integers(1, 4))):
        texts = draw(st.lists(TEXT_BLOCK, min_size=1, max_size=2))
        calls = [block for block in (messages[-1]["content"] if messages else []) if block["type"] == "tool_use"]
        results = [
            {
                "type": "tool_result",
                "tool_use_id": block["id"],
                "content": draw(TEXT | st.lists(TEXT_BLOCK, max_size=2)),
                **({"is_error": True} if draw(st.booleans()) else {}),
            }
            for block in draw(st.permutations(calls))
        ]
        messages.append({"role": "user", "content": results + texts})
        blocks = []
        if draw(st.booleans()):
            blocks.append({"type": "thinking", "thinking": draw(TEXT), "signature": "x"})
        blocks += draw(st.lists(TEXT_BLOCK, max_size=2))
        for _ in range(draw(st.integers(0 if blocks else 1, 2))):
            number += 1
            value = draw(st.dictionaries(NAME, JSON, max_size=3))
            blocks.append({"type": "tool_use", "id": f"t{number}", "name": draw(NAME), "input": value})
        messages.append({"role": "assistant", "content": blocks})
    system = draw(st.lists(TEXT_BLOCK, max_size=2))
    return {"system": system, "messages": messages[: draw(st.integers(1, len(messages)))]}


def _seen(body):
    """What the model sees, in order: everything but cache marks and signatures."""
    seen = [("system", "\n\n".join(block["text"] for block in body["system"]))]
    for message in body["messages"]:
        for block in message["content"]:
            match block["type"]:
                case "text":
                    seen.append((message["role"], block["text"]))
                case "thinking":
                    seen.append(("thinking", block["thinking"]))
                case "tool_use":
                    seen.append(("call", block["id"], block["name"], block["input"]))
                case "tool_result":
                    content = block["content"]
                    texts = [content] if isinstance(content, str) else [one["text"] for one in content]
                    seen.append(("result", block["tool_use_id"], texts, bool(block.get("is_error"))))
    return seen


@settings(deadline=None, max_examples=40)
@given(conversations())
def test_an_anthropic_conversation_survives_the_internal_form(body):
    call = parse_messages(msgspec.json.encode(body), LIMITS)
    back = msgspec.json.decode(msgspec.json.encode(to_conversation(call.messages)))
    assert _seen(back) == _seen(body)
    assert parse_messages(msgspec.json.encode(back), LIMITS).messages == call.messages


def test_the_same_conversation_is_the_same_call_in_every_protocol():
    arguments = '{"d": "/a"}'
    chat = {
        "messages": [
            {"role": "developer", "content": "sys"},
            {"role": "user", "content": "go"},
            {
                "role": "assistant",
                "content": "ok",
                "reasoning_content": "hm",
                "tool_calls": [{"id": "t1", "type": "function", "function": {"name": "ls", "arguments": arguments}}],
            },
            {"role": "tool", "tool_call_id": "t1", "content": "x"},
        ]
    }
    messages = {
        "system": "sys",
        "messages": [
            {"role": "user", "content": "go"},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm"},
                    {"type": "text", "text": "ok"},
                    {"type": "tool_use", "id": "t1", "name": "ls", "input": {"d": "/a"}},
                ],
            },
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "x"}]},
        ],
    }
    responses = {
        "instructions": "sys",
        "input": [
            {"role": "user", "content": "go"},
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "ok"}]},
            {"type": "function_call", "call_id": "t1", "name": "ls", "arguments": arguments},
            {"type": "function_call_output", "call_id": "t1", "output": "x"},
        ],
    }
    one = parse_chat(msgspec.json.encode(chat), LIMITS).call.messages
    two = parse_messages(msgspec.json.encode(messages).replace(b'{"d":"/a"}', arguments.encode()), LIMITS).messages
    three = parse_responses(msgspec.json.encode(responses), LIMITS, {}).call.messages
    assert one == two == three


@pytest.mark.parametrize(
    ("later", "role"), [({"role": "system", "content": "late"}, "user"), ({"role": "user", "content": "late"}, "user")]
)
def test_a_system_message_after_an_answer_stays_where_it_came(later, role):
    body = {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}, later]}
    assert [one.role for one in parse_chat(msgspec.json.encode(body), LIMITS).call.messages] == [
        "user",
        "assistant",
        role,
    ]


ANSWERS = st.lists(
    st.sampled_from(
        [
            "<think>\nhm\n</think>\n\n", "text", " more\n\n", "é😀",
            '\n<tool_call>\n{"name": "f", "arguments": {"a":  1}}\n</tool_call>', "<tool_call>broken</tool_call>", "<thi",
        ]
    ),
    max_size=6,
).map("".join)  # fmt: skip


def _events(raw):
    return [
        msgspec.json.decode(line[6:]) for line in raw.splitlines() if line.startswith("data: ") and "[DONE]" not in line
    ]


def _from_messages(raw):
    blocks = []
    for event in _events(raw):
        if event["type"] == "content_block_start":
            blocks.append({**event["content_block"], "json": ""})
        elif event["type"] == "content_block_delta":
            delta = event["delta"]
            for key in ("text", "thinking", "signature"):
                if key in delta:
                    blocks[-1][key] += delta[key]
            blocks[-1]["json"] += delta.get("partial_json", "")
        elif event["type"] == "message_delta":
            stop = event["delta"]["stop_reason"]
    for block in blocks:
        text = block.pop("json")
        block.pop("id", None)
        if block["type"] == "tool_use":
            block["input"] = msgspec.json.decode(text)
    return blocks, stop


def _from_chat(raw):
    message = {"role": "assistant", "content": "", "reasoning_content": "", "tool_calls": []}
    for event in _events(raw):
        for choice in event["choices"]:
            delta = choice["delta"]
            message["content"] += delta.get("content") or ""
            message["reasoning_content"] += delta.get("reasoning_content") or ""
            for call in delta.get("tool_calls", ()):
                if "id" in call:
                    message["tool_calls"].append([call["function"]["name"], ""])
                message["tool_calls"][call["index"]][1] += call["function"]["arguments"]
            stop = choice["finish_reason"] or ""
    return message, stop


@settings(deadline=None, max_examples=25)
@given(ANSWERS, st.integers(1, 9))
async def test_a_stream_says_what_the_body_says_however_it_was_chunked(text, size):
    tool = {"name": "f", "description": "d", "input_schema": {"type": "object"}, "parameters": {"type": "object"}}
    shared = {
        "messages": [{"role": "user", "content": "x"}],
        "input": "x",
        "max_tokens": 999,
        "include": ["reasoning.encrypted_content"],
    }
    for path in ("/v1/messages", "/v1/chat/completions", "/v1/responses"):
        shown = []
        for stream in (False, True):
            home = house(FakeEngine([text], chunk_size=size))
            ticket = await home.gateway.open_session("s")
            shaped = {"type": "function", "function": tool} if "chat" in path else {**tool, "type": "function"}
            async with home.http(ticket.token) as client:
                response = await client.post(path, json={**shared, "tools": [shaped], "stream": stream})
            assert response.status_code == 200
            shown.append(response.text if stream else response.json())
        body, raw = shown
        if path == "/v1/messages":
            for block in body["content"]:
                block.pop("id", None)
            assert _from_messages(raw) == (body["content"], body["stop_reason"])
        elif path == "/v1/chat/completions":
            message, stop = _from_chat(raw)
            whole = body["choices"][0]
            assert stop == whole["finish_reason"]
            assert message["content"] == (whole["message"]["content"] or "")
            assert message["reasoning_content"] == whole["message"].get("reasoning_content", "")
            calls = [
                [one["function"]["name"], one["function"]["arguments"]]
                for one in whole["message"].get("tool_calls", ())
            ]
            assert message["tool_calls"] == calls
        else:
            completed = _events(raw)[-1]["response"]
            done = [event["item"] for event in _events(raw) if event["type"] == "response.output_item.done"]
            assert done == completed["output"]
            assert [_plain(item) for item in done] == [_plain(item) for item in body["output"]]


def _plain(item):
    return {key: value for key, value in item.items() if key not in ("id", "call_id")}


USER = [{"role": "user", "content": "hi"}]
PREFILLED = [*USER, {"role": "assistant", "content": "It is ("}]
LEGACY_CALL = {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}}
CHAT, TEXTS, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        (CHAT, {"messages": USER, "tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools of type 'custom'"),
        (CHAT, {"messages": USER, "tools": [{"type": "function", "name": "x"}]}, "tools: expected"),
        (CHAT, {"messages": USER, "functions": [{"name": "f", "parameters": {}}]}, "functions"),
        (CHAT, {"messages": USER, "function_call": "auto"}, "function_call"),
        (CHAT, {"messages": [*USER, LEGACY_CALL, *USER]}, "messages: function_call"),
        (CHAT, {"messages": USER, "response_format": {"type": "json_object"}}, "response_format 'json_object'"),
        (CHAT, {"messages": USER, "logprobs": True, "top_logprobs": 5}, "top_logprobs of 5: not served"),
        (CHAT, {"messages": USER, "top_logprobs": 1}, "top_logprobs of 1: not served"),
        (CHAT, {"messages": USER, "modalities": ["text", "audio"]}, "modalities ['text', 'audio']: not served"),
        (CHAT, {"messages": USER, "audio": {"voice": "alloy", "format": "wav"}}, "audio: not served"),
        (TEXTS, {"prompt": "x", "best_of": 3}, "best_of above n"),
        (TEXTS, {"prompt": "x", "logprobs": 5}, "logprobs of 5: not served"),
        (TEXTS, {"prompt": [7, 263]}, "prompt: expected token ids in 0..262, found 263; encode the text with"),
        (TEXTS, {"prompt": [[2**31 - 1]]}, "prompt: expected token ids in 0..262, found 2147483647"),
        (TEXTS, {"prompt": [-1]}, "prompt: expected token ids in 0..2147483647, found -1"),
        (RESPONSES, {"input": "hi", "conversation": "conv_1"}, "conversation"),
        (RESPONSES, {"input": "hi", "conversation": {"id": "conv_1"}}, "conversation"),
        (RESPONSES, {"input": "hi", "prompt": {"id": "p"}}, "prompt"),
        (RESPONSES, {"input": "hi", "include": ["message.output_text.logprobs"]}, "log-probs"),
        (RESPONSES, {"input": "hi", "top_logprobs": 2}, "log-probs"),
        (RESPONSES, {"input": "hi", "text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format 'json_schema'"),
        (MESSAGES, {"messages": PREFILLED, "max_tokens": 9}, "messages that end with the assistant's"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
async def test_what_would_be_passed_over_in_silence_is_a_400(path, body, field, stream):
    home = house()
    ticket = await home.gateway.open_session("s")
    async with home.http(ticket.token) as client:
        refused = await client.post(path, json=body | {"stream": stream})
    error = refused.json()["error"]
    assert (refused.status_code, error["type"]) == (400, "invalid_request_error")
    assert ("type" in refused.json()) == (path == MESSAGES)
    assert error["message"].startswith(field)
    assert home.engine.requests == []
    assert (await home.gateway.close_session("s")).system_error == ""


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": PREFILLED, "functions": [], "function_call": None, "response_format": {"type": "text"}}),
        (CHAT, {"messages": [*USER, {"role": "assistant", "content": "x", "function_call": None}, *USER]}),
        (CHAT, {"messages": USER, "logprobs": True, "top_logprobs": 0, "modalities": ["text"], "audio": None}),
        (TEXTS, {"prompt": "x", "best_of": 2, "n": 2}),
        (TEXTS, {"prompt": [0, 262], "logprobs": 0}),
        (RESPONSES, {"input": "hi", "conversation": None, "prompt": None, "top_logprobs": 0, "text": {"verbosity": "low"}}),
        (RESPONSES, {"input": "hi", "include": ["reasoning.encrypted_content"], "tools": [{"type": "web_search"}]}),
        (MESSAGES, {"messages": USER, "max_tokens": 9, "output_config": {"format": {"type": "json_schema"}}}),
        (MESSAGES, {"messages": USER, "max_tokens": 9, "tools": [{"type": "custom", "name": "x", "input_schema": {}}]}),
        (f"{MESSAGES}/count_tokens", {"messages": PREFILLED}),
    ],
)  # fmt: skip
async def test_what_says_nothing_of_the_answer_is_taken(path, body):
    home = house()
    ticket = await home.gateway.open_session("s")
    async with home.http(ticket.token) as client:
        answer = await client.post(path, json=body)
    assert answer.status_code == 200, answer.text


async def test_log_probs_of_completions_hold_no_empty_places():
    home = house()
    ticket = await home.gateway.open_session("s")
    async with home.http(ticket.token) as client:
        answer = await client.post(TEXTS, json={"prompt": "x", "logprobs": 1})
    shown = answer.json()["choices"][0]["logprobs"]
    assert sorted(shown) == ["token_logprobs", "tokens", "top_logprobs"]
