"""Requests that real clients sent, replayed: each turn extends the one before by its exact tokens, whatever the client rewrote.

The scripted answers of the captures are sampled here by a fake engine. The gateway gives its own ids and splits blanks off, so those
strings are exchanged in the client's next body; all else stands as the client sent it.
"""

import json

import pytest
from gateway_fakes import CAPTURES, FakeEngine, house

CLIENTS = sorted(path.stem for path in CAPTURES.glob("*.json"))


def _parts(path, answer):
    """(reasoning, text, [(id, name, arguments)]) of an answer in any protocol."""
    if answer is None:
        return "", "done", []
    if path.endswith("/messages"):
        reasoning = "".join(block[3] for block in answer if block[0] == "thinking")
        text = "".join(block[3] for block in answer if block[0] == "text")
        return reasoning, text, [(block[1], block[2], block[3]) for block in answer if block[0] == "tool_use"]
    if path.endswith("/responses"):
        reasoning = "".join(part["text"] for item in answer if item["type"] == "reasoning" for part in item["summary"])
        text = "".join(part["text"] for item in answer if item["type"] == "message" for part in item["content"])
        calls = [
            (
                item["call_id"],
                f"{item['namespace']}__{item['name']}" if item.get("namespace") else item["name"],
                item["arguments"] if "arguments" in item else json.dumps({"input": item["input"]}),
            )
            for item in answer
            if item["type"] in ("function_call", "custom_tool_call")
        ]
        return reasoning, text, calls
    calls = [
        (one["id"], one["function"]["name"], one["function"]["arguments"]) for one in answer.get("tool_calls") or ()
    ]
    return answer.get("reasoning_content") or answer.get("reasoning") or "", answer.get("content") or "", calls


def _sampled(parts):
    reasoning, text, calls = parts
    out = f"<think>\n{reasoning}\n</think>\n\n{text}" if reasoning else text
    return out + "".join(
        f'\n<tool_call>\n{{"name": {json.dumps(name)}, "arguments": {arguments}}}\n</tool_call>'
        for _, name, arguments in calls
    )


def _ours(path, body):
    if path.endswith("/messages"):
        shaped = [
            [
                one["type"],
                one.get("id"),
                one.get("name"),
                one.get("thinking") or one.get("text") or json.dumps(one.get("input")),
            ]
            for one in body["content"]
        ]
        return _parts(path, shaped)
    return _parts(path, body["output"] if path.endswith("/responses") else body["choices"][0]["message"])


def _exchanged(value, pairs):
    if isinstance(value, str):
        return pairs.get(value, value)
    if isinstance(value, list):
        return [_exchanged(one, pairs) for one in value]
    if isinstance(value, dict):
        return {key: _exchanged(one, pairs) for key, one in value.items()}
    return value


@pytest.mark.parametrize("client", CLIENTS)
async def test_a_clients_turns_extend_each_other(client):
    steps = json.loads((CAPTURES / f"{client}.json").read_text())["steps"]
    answers = [_parts(step["path"], step["answer"]) for step in steps]
    home = house(FakeEngine([_sampled(one) for one in answers]))
    ticket = await home.gateway.open_session("s")
    pairs: dict[str, str] = {}
    async with home.http(ticket.token) as http:
        for step, answer in zip(steps, answers, strict=True):
            response = await http.post(step["path"], json=_exchanged(step["body"], pairs) | {"stream": False})
            assert response.status_code == 200, response.text
            ours = _ours(step["path"], response.json())
            assert len(ours[2]) == len(answer[2])
            theirs = [*answer[:2], *(one[0] for one in answer[2])]
            mine = [*ours[:2], *(one[0] for one in ours[2])]
            pairs |= {one: other for one, other in zip(theirs, mine, strict=True) if one}
    records = home.recorder.interactions("s")
    assert [one.parent for one in records] == [None, *range(len(steps) - 1)]
    whole = await home.chain("s", len(steps) - 1)
    for request in home.engine.requests:
        assert whole[: request.prompt_ids.size] == request.prompt_ids.tolist()
    assert home.gateway.counts.prefix_breaks == 0
