"""The first thing a user sees: a session, calls, tokens on the log."""

import httpx
import msgspec
from gateway_fakes import IM_END, TOKENIZER, FakeEngine, house, served


async def test_a_second_turn_reuses_the_ids_of_the_first_and_renders_only_what_is_new():
    home = house(FakeEngine(["Hello!", "Bye."]))
    ticket = await home.gateway.open_session("s1")
    async with home.http(ticket.token) as client:
        first = (
            await client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "hi"}]})
        ).json()
        said = first["choices"][0]["message"]
        messages = [{"role": "user", "content": "hi"}, said, {"role": "user", "content": "go"}]
        second = (await client.post("/v1/chat/completions", json={"messages": messages})).json()
    assert said["content"] == "Hello!"
    assert second["choices"][0]["finish_reason"] == "stop"
    records = home.recorder.interactions("s1")
    assert [one.parent for one in records] == [None, 0]
    assert [one.interaction_id for one in records] == [first["id"], second["id"]]
    ids = await home.chain("s1", 1)
    assert TOKENIZER.show(ids) == (
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nHello!<|im_end|>\n<|im_start|>user\ngo<|im_end|>\n"
        "<|im_start|>assistant\nBye.<|im_end|>"
    )
    prompt = home.engine.requests[1].prompt_ids.tolist()
    assert ids[: len(prompt)] == prompt
    closed = await home.gateway.close_session("s1")
    assert closed.num_interactions == 2


async def test_a_stream_over_http_carries_the_same_answer():
    home = house(FakeEngine(["<think>\nhm\n</think>\n\nIt is 4."]))
    ticket = await home.gateway.open_session("s1")
    async with served(home) as url, httpx.AsyncClient(base_url=url) as client:
        text = reasoning = ""
        body = {
            "messages": [{"role": "user", "content": "2+2"}],
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        headers = {"authorization": f"Bearer {ticket.token}"}
        async with client.stream("POST", "/v1/chat/completions", json=body, headers=headers) as response:
            lines = [line[6:] async for line in response.aiter_lines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    chunks = [msgspec.json.decode(line) for line in lines[:-1]]
    for chunk in chunks:
        for choice in chunk["choices"]:
            text += choice["delta"].get("content", "")
            reasoning += choice["delta"].get("reasoning_content", "")
    assert (reasoning, text) == ("hm", "It is 4.")
    assert chunks[-1]["usage"]["completion_tokens"] == home.recorder.interactions("s1")[0].num_completion
    assert (await home.tokens("s1"))[0].completion_ids.as_numpy()[-1] == IM_END
