"""What counts as the recorded message, and what as an edit of the history; how a session's calls grow into a forest."""

import pytest
from gateway_fakes import FakeEngine, house

from stages.gateway.conversation import Message, Tool, ToolCall
from stages.gateway.matching import message_digest
from stages.rewards.forest import build_rows

EDIT = Tool(
    name="Edit",
    parameters={
        "type": "object",
        "properties": {"replace_all": {"type": "boolean", "default": False}, "count": {"type": "integer"}, "new_string": {"type": "string"}},
    },
)  # fmt: skip
TOOLS = {"Edit": EDIT}


def digest(arguments, name="Edit", text="ok"):
    calls = (ToolCall(id="x", name=name, arguments=arguments),)
    return message_digest(Message(role="assistant", texts=(text,), calls=calls), TOOLS)


@pytest.mark.parametrize(
    ("name", "sampled", "echoed"),
    [
        ("Edit", '{"a": 1, "b": [1.0]}', '{"b":[1],"a":1}'),
        ("Edit", '{"new_string": "x"}', '{"replace_all": false, "new_string": "x"}'),
        ("Edit", '{"replace_all": "true"}', '{"replace_all": true}'),
        ("Edit", '{"count": "5"}', '{"count": 5}'),
        ("Edit", '{"count": 5.0}', '{"count": 5}'),
        ("Edit", '{"new_string": "a  \\nb\\t \\r\\n"}', '{"new_string": "a\\nb\\r\\n"}'),
        ("Write", '{"content": "x  "}', '{"content": "x"}'),
        ("Bash", '{"command": "cd /work && ls"}', '{"command": "ls"}'),
        ("Bash", '{"command": "find . -exec rm {} \\\\\\\\;"}', '{"command": "find . -exec rm {} \\\\;"}'),
        ("Edit", "{broken", '{"__unparsedToolInput": {"raw": "{broken", "len": 7}}'),
    ],
)
def test_known_rewrites_of_arguments_are_forgiven(name, sampled, echoed):
    assert digest(sampled, name) == digest(echoed, name)


@pytest.mark.parametrize(
    ("name", "sampled", "echoed"),
    [
        ("Edit", '{"a": 1}', '{"a": 2}'),
        ("Edit", '{"a": 1}', "{}"),
        ("Edit", '{"a": true}', '{"a": 1}'),
        ("Edit", '{"replace_all": true}', "{}"),
        ("Edit", '{"old_string": "a  "}', '{"old_string": "a"}'),
        ("Other", '{"content": "x  "}', '{"content": "x"}'),
        ("Bash", '{"command": "cd /work; ls"}', '{"command": "ls"}'),
        ("Edit", '{"other": "5"}', '{"other": 5}'),
    ],
)
def test_anything_else_is_an_edit(name, sampled, echoed):
    assert digest(sampled, name) != digest(echoed, name)


def test_blank_text_beside_calls_may_be_dropped_and_other_text_not():
    assert digest("{}", text="\n\n") == digest("{}", text="")
    assert digest("{}", text=" a") != digest("{}", text="a")


async def _talk(bodies, answers):
    """Sends each body; a body may name former answers as ("answer", number)."""
    home = house(FakeEngine(answers))
    ticket = await home.gateway.open_session("s")
    said = []
    async with home.http(ticket.token) as client:
        for body in bodies:
            messages = [said[one[1]] if isinstance(one, tuple) else one for one in body]
            response = await client.post("/v1/chat/completions", json={"messages": messages})
            assert response.status_code == 200
            said.append(response.json()["choices"][0]["message"])
    return home, home.recorder.interactions("s")


def user(text):
    return {"role": "user", "content": text}


async def test_sub_agents_compaction_retries_and_edits_each_find_their_place():
    main, sub = user("main"), user("sub")
    bodies = [
        [main],  # 0
        [sub],  # 1: a sub-agent
        [main, ("a", 0), user("b")],  # 2 extends 0
        [sub, ("a", 1), user("c")],  # 3 extends 1
        [main, ("a", 0), user("b")],  # 4: a retry of 2
        [main, ("a", 0), user("b"), ("a", 4), user("d")],  # 5 goes on from the retry
        [user("summary of main"), user("d")],  # 6: compaction
        [main, {"role": "assistant", "content": "edited"}, user("b")],  # 7: an edited history
    ]
    home, records = await _talk(bodies, [f"answer {number}" for number in range(8)])
    assert [one.parent for one in records] == [None, None, 0, 1, 0, 4, None, None]
    assert records[2].digest == records[4].digest
    assert home.gateway.counts.prefix_breaks == 1
    rows = build_rows(records, dict(enumerate(await home.tokens("s"))))
    assert [row.chain for row in rows] == [(1, 3), (0, 4, 5), (6,), (7,)]


async def test_reasoning_that_a_client_leaves_out_stays_in_the_chain_and_edited_reasoning_does_not():
    answer = "<think>\nwhy\n</think>\n\nbecause"
    plain = {"role": "assistant", "content": "because"}
    bodies = [[user("q")], [user("q"), plain, user("r")], [user("q"), plain | {"reasoning_content": "else"}, user("r")]]
    home, records = await _talk(bodies, [answer, "x", "y"])
    assert [one.parent for one in records] == [None, 0, None]
    whole = await home.chain("s", 1)
    assert whole[: home.engine.requests[1].prompt_ids.size] == home.engine.requests[1].prompt_ids.tolist()


async def test_equal_answers_are_told_apart_by_the_ids_of_their_calls():
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    home = house(FakeEngine([call, call, "x", "y", "z"]))
    ticket = await home.gateway.open_session("s")
    tools = [{"type": "function", "function": {"name": "f"}}]
    async with home.http(ticket.token) as client:

        async def ask(*messages):
            response = await client.post("/v1/chat/completions", json={"messages": list(messages), "tools": tools})
            return response.json()["choices"][0]["message"]

        one, two = await ask(user("q")), await ask(user("q"))
        for said in (one, two):
            result = {"role": "tool", "tool_call_id": said["tool_calls"][0]["id"], "content": "r"}
            await ask(user("q"), said, result)
        nameless = {**one, "tool_calls": [{key: value for key, value in one["tool_calls"][0].items() if key != "id"}]}
        await ask(user("q"), nameless, {"role": "tool", "content": "r"})
    assert [one.parent for one in home.recorder.interactions("s")] == [None, None, 0, 1, 1]
