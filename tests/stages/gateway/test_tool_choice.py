"""What a request's tool_choice does, and which ones are refused: those that the protocols' own servers refuse, and no others."""

import msgspec
import pytest
from gateway_fakes import FakeEngine, house

from stages.gateway.settings import ToolFormat

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
SCHEMA = {"type": "object", "properties": {}}
TOOLS = {
    CHAT: [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in ("look", "move")],
    RESPONSES: [
        {"type": "function", "name": "look", "parameters": SCHEMA},
        {"type": "custom", "name": "patch"},
        {"type": "namespace", "name": "crew", "tools": [{"type": "function", "name": "spawn", "parameters": SCHEMA}]},
        {"type": "web_search"},
    ],
    MESSAGES: [
        {"name": "look", "input_schema": SCHEMA},
        {"name": "move", "input_schema": SCHEMA},
        {"type": "web_search_20250305", "name": "web_search"},
    ],
}
USER = [{"role": "user", "content": "hi"}]
BODIES = {CHAT: {"messages": USER}, RESPONSES: {"input": "hi"}, MESSAGES: {"messages": USER, "max_tokens": 99}}


def chat_named(name):
    return {"type": "function", "function": {"name": name}}


def chat_allowed(mode, *names):
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [chat_named(name) for name in names]}}


def allowed(mode, *tools):
    return {"type": "allowed_tools", "mode": mode, "tools": list(tools)}


async def ask(home, path, choice, tools=None):
    token = (await home.gateway.open_session("s")).token
    given = {} if tools is None else {"tools": tools}
    async with home.http(token) as client:
        return await client.post(path, json={**BODIES[path], **given, "tool_choice": choice})


@pytest.mark.parametrize(
    ("path", "choice", "recorded"),
    [
        (CHAT, "none", {"tool_choice": "none"}),
        (CHAT, "auto", {"tool_choice": "auto"}),
        (CHAT, "required", {"tool_choice": "required"}),
        (CHAT, chat_named("look"), {"tool_choice": "look"}),
        (CHAT, chat_allowed("required", "look"), {"tool_choice": "required", "allowed_tools": ["look"]}),
        (RESPONSES, "required", {"tool_choice": "required"}),
        (RESPONSES, {"type": "function", "name": "look"}, {"tool_choice": "look"}),
        (RESPONSES, {"type": "function", "name": "spawn"}, {"tool_choice": "crew__spawn"}),
        (RESPONSES, {"type": "custom", "name": "patch"}, {"tool_choice": "patch"}),
        (RESPONSES, {"type": "web_search"}, {"tool_choice": "web_search"}),
        (
            RESPONSES,
            allowed("auto", {"type": "function", "name": "spawn"}, {"type": "web_search"}),
            {"tool_choice": "auto", "allowed_tools": ["crew__spawn", "web_search"]},
        ),
        (MESSAGES, {"type": "auto"}, {"tool_choice": "auto", "parallel_tool_calls": True}),
        (MESSAGES, {"type": "none"}, {"tool_choice": "none", "parallel_tool_calls": True}),
        (MESSAGES, {"type": "any"}, {"tool_choice": "required", "parallel_tool_calls": True}),
        (MESSAGES, {"type": "tool", "name": "move"}, {"tool_choice": "move", "parallel_tool_calls": True}),
        # Claude Code searches the web by a call of its own that names the provider's tool.
        (MESSAGES, {"type": "tool", "name": "web_search"}, {"tool_choice": "web_search", "parallel_tool_calls": True}),
    ],
)
async def test_each_form_of_each_protocol_is_taken_and_recorded(path, choice, recorded):
    home = house()
    answer = await ask(home, path, choice, TOOLS[path])
    assert answer.status_code == 200, answer.text
    (record,) = home.recorder.interactions("s")
    kept = msgspec.json.decode(record.requested_settings_json)
    kept.pop("max_tokens", None)
    assert kept == recorded


@pytest.mark.parametrize(
    ("path", "choice"),
    [
        (CHAT, None),
        (CHAT, "auto"),
        (CHAT, "none"),
        (RESPONSES, "auto"),
        (MESSAGES, {"type": "auto"}),
        (MESSAGES, {"type": "none"}),
    ],
)
@pytest.mark.parametrize("tools", [None, []])
async def test_a_choice_that_asks_for_no_tool_needs_none(path, choice, tools):
    assert (await ask(house(), path, choice, tools)).status_code == 200


@pytest.mark.parametrize(
    ("path", "choice", "says"),
    [
        (CHAT, "any", "tool_choice: expected none, auto, required or an object of type function or allowed_tools, found 'any'; send one of those"),
        (CHAT, "look", "tool_choice: expected none, auto, required or"),
        (CHAT, {"type": "tool", "name": "look"}, "tool_choice: expected none, auto, required or an object of type function or allowed_tools, found 'tool'"),
        (CHAT, {"type": "custom", "custom": {"name": "look"}}, "tool_choice: expected none, auto, required or"),
        (CHAT, {"type": "function", "name": "look"}, 'tool_choice: expected {"type": "function", "function": {"name": …}}, found no name'),
        (CHAT, chat_named("lok"), "tool_choice: expected the name of one of the tools (look, move), found 'lok'; name one of them"),
        (CHAT, chat_allowed("always", "look"), "tool_choice: expected allowed_tools with mode auto or required, found 'always'"),
        (CHAT, chat_allowed("auto"), "tool_choice: expected allowed_tools with at least one tool"),
        (CHAT, chat_allowed("auto", "look", "lok"), "tool_choice: expected the name of one of the tools (look, move), found 'lok'"),
        (RESPONSES, "any", "tool_choice: expected none, auto, required or an object of type function, custom, allowed_tools or"),
        (RESPONSES, {"type": "function", "name": "patch_"}, "tool_choice: expected the name of one of the tools (crew__spawn, look, patch, web_search), found 'patch_'"),
        (RESPONSES, {"type": "function"}, "tool_choice: expected a name beside type 'function'"),
        (RESPONSES, {"type": "file_search"}, "tool_choice: expected none, auto, required or an object"),
        (RESPONSES, allowed("auto", {"type": "function", "name": "spawn", "namespace": "team"}), "tool_choice: expected the name of one of the tools"),
        (MESSAGES, {"type": "required"}, "tool_choice: expected an object of type auto, any, tool or none, found 'required'"),
        (MESSAGES, {"type": "tool"}, 'tool_choice: expected {"type": "tool", "name": …}'),
        (MESSAGES, {"type": "tool", "name": "lok"}, "tool_choice: expected the name of one of the tools (look, move, web_search), found 'lok'"),
        (MESSAGES, "auto", "the body can't be used: Expected `object | null`, got `str` - at `$.tool_choice`"),
    ],
)  # fmt: skip
async def test_what_the_protocol_does_not_have_is_a_400_in_its_own_form(path, choice, says):
    home = house()
    refused = await ask(home, path, choice, TOOLS[path])
    error = refused.json()["error"]
    assert (refused.status_code, error["type"]) == (400, "invalid_request_error")
    assert ("type" in refused.json()) == (path == MESSAGES)
    assert error["message"].startswith(says)
    assert home.engine.requests == []


@pytest.mark.parametrize(
    ("path", "choice"),
    [
        (CHAT, "required"),
        (CHAT, chat_named("look")),
        (CHAT, chat_allowed("auto", "look")),
        (RESPONSES, "required"),
        (RESPONSES, {"type": "function", "name": "look"}),
        (MESSAGES, {"type": "any"}),
        (MESSAGES, {"type": "tool", "name": "look"}),
    ],
)
@pytest.mark.parametrize("tools", [None, []])
async def test_a_choice_of_tools_without_tools_is_a_400(path, choice, tools):
    refused = await ask(house(), path, choice, tools)
    assert refused.status_code == 400
    assert "tool_choice: expected tools beside" in refused.json()["error"]["message"]


_CALLS = {
    ToolFormat.HERMES: '<tool_call>\n{{"name": "{}", "arguments": {{}}}}\n</tool_call>',
    ToolFormat.QWEN3_CODER: "<tool_call>\n<function={}>\n</function>\n</tool_call>",
}


@pytest.mark.parametrize("form", list(_CALLS))
async def test_calls_of_tools_that_are_not_allowed_stay_text_and_the_prompt_stays_the_same(form):
    look, move = (_CALLS[form].format(name) for name in ("look", "move"))
    home = house(FakeEngine([f"{move}\n{look}"]), tool_format=form)
    free = (await ask(home, CHAT, "auto", TOOLS[CHAT])).json()["choices"][0]["message"]
    assert [call["function"]["name"] for call in free["tool_calls"]] == ["move", "look"]
    bound = (await ask(home, CHAT, chat_allowed("auto", "look"), TOOLS[CHAT])).json()["choices"][0]["message"]
    assert [call["function"]["name"] for call in bound["tool_calls"]] == ["look"]
    assert bound["content"] == move
    first, second = home.engine.requests
    assert first.prompt_ids.tolist() == second.prompt_ids.tolist()


async def test_a_long_list_of_tools_is_shown_in_part():
    tools = [{"name": f"tool_{number:02}", "input_schema": SCHEMA} for number in range(40)]
    refused = await ask(house(), MESSAGES, {"type": "tool", "name": "x"}, tools)
    assert "(tool_00, " in refused.json()["error"]["message"]
    assert "tool_09, …)" in refused.json()["error"]["message"]
