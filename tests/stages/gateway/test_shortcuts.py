"""Long conversations are read from where they are known; whatever the client changes, the result is that of reading the whole."""

import json

import pytest
from gateway_fakes import FakeEngine, house
from hypothesis import given, settings
from hypothesis import strategies as st

ANSWERS = [f"answer {number}" for number in range(40)]


def _watched(home, session):
    """How many bodies of a session were read by a shortcut."""
    hits: list[bool] = []
    find = session.shortcuts.find

    def counted(protocol, body):
        cut = find(protocol, body)
        hits.append(cut is not None)
        return cut

    session.shortcuts.find = counted
    return hits


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
async def test_later_turns_are_read_by_a_shortcut_and_extend_the_chain(path):
    home = house(FakeEngine(ANSWERS))
    ticket = await home.gateway.open_session("s")
    hits = _watched(home, home.gateway.sessions.named("s"))
    messages: list = [{"role": "user", "content": "go"}]
    async with home.http(ticket.token) as client:
        for turn in range(6):
            marked = messages
            if path == "/v1/messages":
                last = {"type": "text", "text": messages[-1]["content"], "cache_control": {"type": "ephemeral"}}
                marked = [*messages[:-1], {"role": "user", "content": [last]}]
            key = "input" if path == "/v1/responses" else "messages"
            body = {
                "model": "p",
                key: marked,
                "system": "outer",
                "instructions": "outer",
                "store": False,
                "max_tokens": 99,
            }
            answer = (await client.post(path, json=body)).json()
            match path:
                case "/v1/messages":
                    messages.append({"role": "assistant", "content": answer["content"]})
                case "/v1/responses":
                    messages += answer["output"]
                case _:
                    messages.append(answer["choices"][0]["message"])
            messages.append({"role": "user", "content": f"turn {turn}"})
    assert [one.parent for one in home.recorder.interactions("s")] == [None, 0, 1, 2, 3, 4]
    assert hits == [False, False, True, True, True, True]
    whole = await home.chain("s", 5)
    assert whole[: home.engine.requests[5].prompt_ids.size] == home.engine.requests[5].prompt_ids.tolist()


EDITS = st.sampled_from(["none", "none", "none", "first", "answer", "system", "tools", "spaces", "fork", "late-system"])


@settings(max_examples=25, deadline=None)
@given(st.lists(EDITS, min_size=3, max_size=7))
async def test_a_shortcut_changes_nothing_but_the_work(edits):
    """The same requests to a gateway with shortcuts and to one that never finds any."""
    homes = [house(FakeEngine(ANSWERS)) for _ in range(2)]
    tickets = [await home.gateway.open_session("s") for home in homes]
    homes[1].gateway.sessions.named("s").shortcuts.find = lambda *_: None
    messages: list = [{"role": "system", "content": "sys"}, {"role": "user", "content": "go"}]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    for turn, edit in enumerate(edits):
        match edit:
            case "first":
                messages[1] = {"role": "user", "content": f"go {turn}"}
            case "answer" if len(messages) > 3:
                messages[2] = {"role": "assistant", "content": f"edited {turn}"}
            case "system":
                messages[0] = {"role": "system", "content": f"sys {turn}"}
            case "tools":
                tools = [{"type": "function", "function": {"name": f"f{turn}", "parameters": {"type": "object"}}}]
            case "fork" if len(messages) > 3:
                messages = messages[:-2]
            case "late-system":
                messages.append({"role": "system", "content": f"note {turn}"})
        text = json.dumps(
            {"messages": messages, "tools": tools}, separators=(" , ", " : ") if edit == "spaces" else None
        )
        said = []
        for home, ticket in zip(homes, tickets, strict=True):
            async with home.http(ticket.token) as client:
                response = await client.post("/v1/chat/completions", content=text)
            assert response.status_code == 200
            said.append(response.json()["choices"][0]["message"])
        assert said[0] == said[1]
        messages = [*messages, said[0], {"role": "user", "content": f"turn {turn}"}]
    one, two = ([request.prompt_ids.tolist() for request in home.engine.requests] for home in homes)
    assert one == two
    shapes = [
        [(record.parent, record.num_context, record.digest) for record in home.recorder.interactions("s")]
        for home in homes
    ]
    assert shapes[0] == shapes[1]
    payloads = [[bytes(tokens.messages_json) for tokens in await home.tokens("s")] for home in homes]
    assert payloads[0] == payloads[1]
