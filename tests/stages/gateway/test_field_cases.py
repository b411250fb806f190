"""Faults that others reported of their gateways, as tests of this one. Each test names the report it comes from."""

import anyio
import httpx
import msgspec
import numpy as np
from gateway_fakes import IM_END, TOKENIZER, FakeEngine, chunk_of, house

from schemas.messages.rollout import FinishReason
from stages.gateway.budget import remaining_budget
from stages.gateway.conversation import CallArguments, CallStarted, Reasoning, Text
from stages.gateway.protocols.messages import parse_messages
from stages.gateway.protocols.messages_stream import BlockStream
from stages.gateway.rendering import template_message
from stages.gateway.settings import GatewayLimits
from stages.rewards.forest import build_rows

LIMITS = GatewayLimits()


async def test_tool_results_as_blocks_reach_the_model__litellm_25669():
    body = {
        "model": "policy",
        "max_tokens": 64,
        "tools": [{"name": "ls", "input_schema": {"type": "object", "properties": {"d": {"type": "string"}}}}],
        "messages": [
            {"role": "user", "content": "list both dirs"},
            {
                "role": "assistant",
                "content": [
                    {"type": "text", "text": "ok"},
                    {"type": "tool_use", "id": "t1", "name": "ls", "input": {"d": "/a"}},
                    {"type": "tool_use", "id": "t2", "name": "ls", "input": {"d": "/b"}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "t1", "content": "x"},
                    {
                        "type": "tool_result",
                        "tool_use_id": "t2",
                        "content": [{"type": "text", "text": "y"}],
                        "is_error": True,
                    },
                ],
            },
        ],
    }
    call = parse_messages(msgspec.json.encode(body), LIMITS)
    assert [template_message(one) for one in call.messages] == [
        {"role": "user", "content": "list both dirs"},
        {
            "role": "assistant",
            "content": "ok",
            "tool_calls": [
                {"id": "t1", "type": "function", "function": {"name": "ls", "arguments": {"d": "/a"}}},
                {"id": "t2", "type": "function", "function": {"name": "ls", "arguments": {"d": "/b"}}},
            ],
        },
        {"role": "tool", "tool_call_id": "t1", "content": "x"},
        {"role": "tool", "tool_call_id": "t2", "content": "y"},
    ]


def test_no_text_is_lost_when_a_stream_switches_blocks__litellm_30765():
    events = [
        Reasoning("let me"),
        Reasoning(" see"),
        Text("FINAL"),
        Text(": 42"),
        CallStarted(0, "t1", "f"),
        CallArguments(0, '{"a"'),
        CallArguments(0, ": 1}"),
        Reasoning("again"),
    ]
    stream = BlockStream()
    raw = b"".join(stream.take(event) for event in events) + stream.close()
    sent = [msgspec.json.decode(line[6:]) for line in raw.decode().splitlines() if line.startswith("data: ")]
    blocks: list[list] = []
    opened = None
    for event in sent:
        match event["type"]:
            case "content_block_start":
                assert opened is None
                opened = event["index"]
                block = event["content_block"]
                assert [block.get(key) for key in ("text", "thinking", "input") if block.get(key)] == []
                blocks.append([event["index"], block["type"], ""])
            case "content_block_delta":
                assert event["index"] == opened
                delta = event["delta"]
                blocks[-1][2] += delta.get("text", "") + delta.get("thinking", "") + delta.get("partial_json", "")
            case "content_block_stop":
                assert event["index"] == opened
                opened = None
    assert opened is None
    assert blocks == [
        [0, "thinking", "let me see"],
        [1, "text", "FINAL: 42"],
        [2, "tool_use", '{"a": 1}'],
        [3, "thinking", "again"],
    ]


async def test_a_system_message_inside_the_list_joins_the_front_on_every_turn__vllm_48874():
    home = house(FakeEngine(["done", "more"]))
    ticket = await home.gateway.open_session("s")
    messages = [{"role": "user", "content": "task"}, {"role": "system", "content": "S2"}]
    body = {"model": "policy", "max_tokens": 64, "system": [{"type": "text", "text": "S1"}], "messages": messages}
    call = parse_messages(msgspec.json.encode(body), LIMITS)
    assert [template_message(one) for one in call.messages] == [
        {"role": "system", "content": "S1\n\nS2"},
        {"role": "user", "content": "task"},
    ]
    async with home.http(ticket.token) as client:
        first = await client.post("/v1/messages", json=body)
        assert first.status_code == 200
        messages += [{"role": "assistant", "content": first.json()["content"]}, {"role": "user", "content": "go on"}]
        assert (await client.post("/v1/messages", json=body)).status_code == 200
    assert [one.parent for one in home.recorder.interactions("s")] == [None, 0]
    one, two = (request.prompt_ids.tolist() for request in home.engine.requests)
    assert two[: len(one)] == one


async def test_a_call_that_outlives_its_session_is_dropped_and_revives_nothing__rllm_797():
    engine = FakeEngine(["first", "second"])
    home = house(engine)
    ticket = await home.gateway.open_session("S")
    body = {"messages": [{"role": "user", "content": "hi"}]}
    late: list[httpx.Response] = []
    async with home.http(ticket.token) as client, anyio.create_task_group() as tasks:
        await client.post("/v1/chat/completions", json=body)
        engine.gate = anyio.Event()

        async def second():
            late.append(await client.post("/v1/chat/completions", json=body))

        tasks.start_soon(second)
        while engine.started < 2:
            await anyio.lowlevel.checkpoint()
        closed = await home.gateway.close_session("S")
        engine.gate.set()
    async with home.http(ticket.token) as client:
        after = await client.post("/v1/chat/completions", json=body)
    assert (closed.num_interactions, closed.late_drops) == (1, 1)
    assert late[0].status_code == after.status_code == 410
    assert len(home.gateway.sessions) == 0
    assert len(home.recorder.interactions("S")) == 1
    assert engine.closed == 2
    assert len(engine.requests) == 2


async def _calls(home, calls):
    ticket = await home.gateway.open_session("S")
    async with home.http(ticket.token) as client:
        for prompt in calls:
            response = await client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 8})
            assert response.status_code == 200, response.text
    records = home.recorder.interactions("S")
    return records, dict(enumerate(await home.tokens("S")))


def _scripted(*completions):
    """An engine that samples exactly these ids, one list a call."""
    return FakeEngine([[chunk_of(ids, finish=FinishReason.STOP)] for ids in completions])


async def test_conversations_of_one_session_do_not_cut_each_other__verl_6299():
    home = house(_scripted([3, 4], [7], [6], [2], [51], [60]))
    calls = [[1, 2], [9, 8], [1, 2, 3, 4, 5], [9, 8, 7, 5], [1, 50], [1, 2, 3, 4, 5]]
    records, tokens = await _calls(home, calls)
    rows = build_rows(records, tokens, style="concat", shared_tokens="first", drop_retries=False)
    chains = {(tuple(row.token_ids.tolist()), tuple(row.loss_mask.astype(int).tolist())) for row in rows}
    assert chains == {
        ((1, 2, 3, 4, 5, 6), (0, 0, 1, 1, 0, 1)),
        ((9, 8, 7, 5, 2), (0, 0, 1, 0, 1)),
        ((1, 50, 51), (0, 0, 1)),
        ((1, 2, 3, 4, 5, 60), (0, 0, 0, 0, 0, 1)),
    }
    assert sum(row.num_loss_tokens for row in rows) == 3 + 2 + 1 + 1
    assert len(records) == 6


async def test_no_id_is_lost_while_a_parser_holds_text_back__vllm_27482():
    text = '<tool_call>{"name": "f", "arguments": {"a": "é"}}</tool_call>'
    ids = [*TOKENIZER.encode(text).tolist(), IM_END]
    parts = [ids[:1], ids[1:3], ids[3:4], ids[4:-1], ids[-1:]]
    chunks = [chunk_of(part, finish=FinishReason.STOP if part is parts[-1] else None) for part in parts]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    answers = []
    for stream in (True, False):
        home = house(FakeEngine([chunks]))
        ticket = await home.gateway.open_session("s")
        body = {"messages": [{"role": "user", "content": "x"}], "tools": tools, "stream": stream}
        body |= {"stream_options": {"include_usage": True}} if stream else {}
        async with home.http(ticket.token) as client:
            response = await client.post("/v1/chat/completions", json=body)
        (tokens,) = await home.tokens("s")
        assert tokens.completion_ids.as_numpy().tolist() == ids
        assert tokens.logprobs.length == tokens.versions.total == len(ids)
        assert home.recorder.interactions("s")[0].trainable
        answers.append((tokens.logprobs, len(ids)))
        raw = response.text
        assert f'"completion_tokens":{len(ids)}' in raw
        assert '{\\"a\\": \\"é\\"}' in raw
    assert answers[0] == answers[1]


async def test_a_completion_with_missing_logprobs_is_kept_out_of_training__vllm_27482():
    home = house(FakeEngine([[chunk_of([11, 12], logprobs=[-0.5], finish=FinishReason.STOP)]]))
    await _calls(home, [[1, 2]])
    (record,) = home.recorder.interactions("S")
    assert (record.trainable, record.untrainable_reason) == (False, "logprobs")
    assert home.gateway.counts.engine_faults == 1


async def test_a_turn_that_extends_is_one_row_with_both_turns_trained__rllm_352():
    home = house(_scripted([3, 4, 5], [7]))
    records, tokens = await _calls(home, [[1, 2], [1, 2, 3, 4, 5, 6]])
    (row,) = build_rows(records, tokens)
    assert row.token_ids.tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert row.loss_mask.astype(int).tolist() == [0, 0, 1, 1, 1, 0, 1]


async def test_a_rewritten_turn_is_a_second_row_and_a_counted_break__rllm_352():
    home = house(_scripted([3, 4, 5], [7]))
    records, tokens = await _calls(home, [[1, 2], [1, 2, 5, 6]])
    rows = build_rows(records, tokens)
    assert [row.token_ids.tolist() for row in rows] == [[1, 2, 3, 4, 5], [1, 2, 5, 6, 7]]
    assert [row.loss_mask.astype(int).tolist() for row in rows] == [[0, 0, 1, 1, 1], [0, 0, 0, 0, 1]]
    assert home.gateway.counts.prefix_breaks == 1


async def test_sampled_ids_stay_where_encoding_would_merge_them__rllm_352():
    class Merging(type(TOKENIZER)):
        """Encodes "ab" as one id; decodes 20 and 21 as "a" and "b", which it never encodes to."""

        def encode(self, text):
            return np.array([22] if text == "ab" else super().encode(text), dtype=np.int32)

        def decode(self, token_ids):
            pieces = {20: "a", 21: "b", 22: "ab"}
            return "".join(pieces.get(int(one)) or TOKENIZER.decode([one]) for one in token_ids)

    home = house(FakeEngine([[chunk_of([20, 21, IM_END], finish=FinishReason.STOP)], "x"]), tokenizer=Merging())
    ticket = await home.gateway.open_session("s")
    messages = [{"role": "user", "content": "q"}]
    async with home.http(ticket.token) as client:
        said = (await client.post("/v1/chat/completions", json={"messages": messages})).json()["choices"][0]["message"]
        assert said["content"] == "ab"
        messages += [said, {"role": "user", "content": "again"}]
        await client.post("/v1/chat/completions", json={"messages": messages})
    row = build_rows(home.recorder.interactions("s"), dict(enumerate(await home.tokens("s"))))[0]
    ids = row.token_ids.tolist()
    assert ids[ids.index(20) : ids.index(20) + 3] == [20, 21, IM_END]
    assert 22 not in ids


def test_only_the_remaining_budget_is_asked_for_after_an_interruption__slime_2260():
    asked = remaining_budget(max_response=24576, max_context=40960, num_prompt=2000, num_generated=17202)
    assert asked == 7374
    assert remaining_budget(max_response=24576, max_context=40960, num_prompt=2000, num_generated=24576) == 0
    assert remaining_budget(max_response=24576, max_context=20000, num_prompt=2000, num_generated=17202) == 797


async def test_an_aborted_answer_goes_on_with_both_versions_logprobs__slime_2260():
    segments = [
        [chunk_of([40, 41, 42], version=3, finish=FinishReason.ABORT)],
        [chunk_of([43, 44], version=4, finish=FinishReason.LENGTH)],
    ]
    home = house(FakeEngine(segments), context_length=64)
    ticket = await home.gateway.open_session("s")
    async with home.http(ticket.token) as client:
        response = await client.post("/v1/completions", json={"prompt": [1, 2], "max_tokens": 5})
    assert response.json()["choices"][0]["finish_reason"] == "length"
    assert [request.settings.max_new_tokens for request in home.engine.requests] == [5, 2]
    assert home.engine.requests[1].prompt_ids.tolist() == [1, 2, 40, 41, 42]
    (tokens,) = await home.tokens("s")
    assert tokens.completion_ids.as_numpy().tolist() == [40, 41, 42, 43, 44]
    assert tokens.versions.as_numpy().tolist() == [3, 3, 3, 4, 4]
    (record,) = home.recorder.interactions("s")
    assert (record.min_version, record.max_version) == (3, 4)


async def test_a_budget_used_up_by_an_abort_ends_without_another_request__slime_2260():
    home = house(FakeEngine([[chunk_of([40, 41], finish=FinishReason.ABORT)]]))
    await _calls(home, [[1, 2]][:0])
    ticket = await home.gateway.open_session("S")
    async with home.http(ticket.token) as client:
        response = await client.post("/v1/completions", json={"prompt": [1, 2], "max_tokens": 2})
    assert response.json()["choices"][0]["finish_reason"] == "length"
    assert len(home.engine.requests) == 1
