"""The local Arena as its callers see it: keys, harness kinds, streams, faults."""

import asyncio
import json

import pytest
from aiohttp import web

from ops.arena.config import CallFault, CallName, EpisodeFault, FaultPlan, load_config
from ops.arena.faults import Faults
from ops.arena.jobs import custom_headers
from ops.arena.quickstart import quickstart_config
from ops.arena.state import ArenaState

CHAT = {"model": "stream-areal-test", "messages": [{"role": "user", "content": "x"}]}
LOOP = 'kind = "openai_loop"\nmax_tokens = 4'


async def test_the_model_gateway_takes_its_own_key_only_and_calls_upstream_with_the_registrations(
    start_arena, chat
) -> None:
    arena = await start_arena()
    await arena.register(chat.url)
    status, _ = await arena.generate("/v1/chat/completions", CHAT)
    assert status == 200
    assert chat.headers[0]["authorization"] == "Bearer upstream-key"
    for wrong in ("", "control-token", "upstream-key"):
        status, _ = await arena.generate("/v1/chat/completions", CHAT, key=wrong)
        assert status == 401
    status, text = await arena.generate("/v1/messages", {**CHAT, "model": "stream-areal-none", "max_tokens": 1})
    assert (status, json.loads(text)["error"]["type"]) == (404, "not_found_error")
    assert len(chat.calls) == 1


async def test_health_probes_reach_no_upstream_and_need_no_key(start_arena, chat) -> None:
    arena = await start_arena()
    await arena.register(chat.url)
    for method, path in (("GET", "/api/"), ("HEAD", "/api/"), ("HEAD", "/api/hello")):
        async with arena.http.request(method, arena.url + path) as answer:
            assert answer.status == 200
    assert chat.calls == []


@pytest.mark.parametrize(("path", "body", "done"), [
    ("/v1/chat/completions", CHAT, "[DONE]"),
    ("/v1/messages", {**CHAT, "max_tokens": 4}, "message_stop"),
    ("/v1/responses", {"model": "stream-areal-test", "input": "x"}, "response.completed"),
])  # fmt: skip
async def test_streams_pass_through_converted_with_pings_for_keep_alive_comments(
    start_arena, chat, path, body, done
) -> None:
    async def stream(request):
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        await answer.write(b": keep-alive\n\n")
        for text in ("4", "2"):
            chunk = {"id": "c", "choices": [{"index": 0, "delta": {"content": text}}]}
            await answer.write(f"data: {json.dumps(chunk)}\n\n".encode())
        await answer.write(b"data: [DONE]\n\n")
        return answer

    chat.answers = [stream]
    arena = await start_arena()
    await arena.register(chat.url)
    status, text = await arena.generate(path, {**body, "stream": True})
    assert status == 200
    assert done in text
    assert text.index('"4"') < text.index('"2"')
    assert ("ping" in text) == (path != "/v1/chat/completions")
    assert chat.calls[0]["stream"] is True


async def test_a_refusal_upstream_reaches_the_harness_with_its_status_and_retry_after(start_arena, chat) -> None:
    async def refuse(_request):
        return web.json_response(
            {"error": {"message": "later", "type": "rate_limit"}}, status=429, headers={"Retry-After": "3"}
        )

    chat.answers = [refuse, refuse]
    arena = await start_arena()
    await arena.register(chat.url)
    async with arena.http.post(
        f"{arena.url}/api/v1/messages", json={**CHAT, "max_tokens": 1}, headers={"x-api-key": "gateway-key"}
    ) as answer:
        assert (answer.status, answer.headers["Retry-After"]) == (429, "3")
        assert (await answer.json())["error"]["type"] == "rate_limit_error"
    await arena.register("http://127.0.0.1:9")
    status, _ = await arena.generate("/v1/chat/completions", CHAT)
    assert status == 502


@pytest.mark.parametrize("kind", ["openai_loop", "responses_loop", "anthropic_loop"])
async def test_a_context_overflow_fails_the_harness_with_a_receipt_that_names_it(start_arena, chat, kind) -> None:
    async def overflow(_request):
        return web.json_response(
            {"error": {"message": "too long", "type": "invalid_request_error", "code": "context_length_exceeded"}},
            status=400,
        )

    chat.answers = [overflow]
    arena = await start_arena(f'kind = "{kind}"', rest="")
    await arena.register(chat.url)
    result = await arena.played()
    assert (result["status"], result["raw"]["error"]["type"]) == ("HARNESS_FAILED", "context_length_exceeded")


async def test_a_harness_tries_a_busy_model_again(start_arena, chat) -> None:
    async def busy(_request):
        return web.json_response({"error": {"message": "busy"}}, status=503, headers={"Retry-After": "0"})

    chat.answers = [busy, busy, "-4"]
    arena = await start_arena(LOOP)
    await arena.register(chat.url)
    assert (await arena.played())["score"] == 1.0
    assert len(chat.calls) == 3


async def test_an_empty_reply_is_no_output(start_arena, chat) -> None:
    chat.answers = ["  \n"]
    arena = await start_arena(LOOP)
    await arena.register(chat.url)
    result = await arena.played()
    assert (result["status"], result["score"]) == ("NO_OUTPUT", None)


async def test_a_wrong_answer_is_scored_not_failed(start_arena, chat) -> None:
    chat.answers = ["12345"]
    arena = await start_arena(LOOP, stream='scorer = "exact"')
    await arena.register(chat.url)
    result = await arena.played()
    assert (result["status"], result["score"]) == ("DONE", 0.0)


async def test_a_fault_plan_comes_from_a_file(start_arena, tmp_path) -> None:
    plan = tmp_path / "plan.json"
    plan.write_text(
        json.dumps(
            {
                "seed": 3,
                "calls": [{"call": "streams.list", "kind": "status", "status": 500, "limit": 1}],
                "episodes": [{"kind": "status", "status": "TIMEOUT", "with_score": True}],
            }
        )
    )
    await start_arena()
    (config,) = tmp_path.glob("arena-*.toml")
    config.write_text(f'faults_file = "{plan}"\n' + config.read_text())
    faults = load_config(config).faults
    assert (faults.seed, faults.episodes[0].status) == (3, "TIMEOUT")


def test_faults_are_the_same_for_a_seed_however_other_calls_interleave() -> None:
    launch = CallFault(call=CallName.LAUNCH, kind="status", probability=0.3)
    result = CallFault(call=CallName.RESULT, kind="status", probability=0.5)
    plan = FaultPlan(seed=5, calls=(launch, result))
    alone, mixed = Faults(plan), Faults(plan)
    first = [bool(alone.of_call(CallName.LAUNCH)) for _ in range(200)]
    second = []
    for _ in range(200):
        mixed.of_call(CallName.RESULT)
        second.append(bool(mixed.of_call(CallName.LAUNCH)))
    assert first == second
    assert 30 < sum(first) < 90
    assert first != [bool(Faults(FaultPlan(seed=6, calls=(launch,))).of_call(CallName.LAUNCH)) for _ in range(200)]


def test_skip_and_limit_bound_a_fault() -> None:
    fault = EpisodeFault(kind="status", status="FAILED", stream_id="a", skip=2, limit=3)
    faults = Faults(FaultPlan(episodes=(fault,)))
    struck = [faults.of_episode("a") is not None for _ in range(10)]
    assert struck == [False, False, True, True, True, False, False, False, False, False]
    assert faults.of_episode("b") is None


def test_header_lines_are_read_as_claude_code_reads_them() -> None:
    assert custom_headers("X-Session-Id: s-1\nX-Session-Token: a:b\n\nbroken") == {
        "X-Session-Id": "s-1",
        "X-Session-Token": "a:b",
    }


def test_the_quickstarts_streams_have_short_prompts_and_different_rewards() -> None:
    state = ArenaState(quickstart_config())
    rewards = set()
    for source in state.sources.values():
        texts = [source.texts(data_id) for data_id in source.data_ids[:50]]
        assert max(len(turn) for text in texts for turn in text.turns) < 64
        assert all(
            source.score(data_id, text.answer) == 1.0 for data_id, text in zip(source.data_ids, texts, strict=False)
        )
        rewards.add(source.reward_key)
    assert len(rewards) == 2


async def test_ended_tasks_are_forgotten_beyond_their_limit(start_arena) -> None:
    arena = await start_arena()
    ids = [await arena.launch(number) for number in range(3)]
    await asyncio.gather(*[arena.finished(task_id) for task_id in ids])
    status, listed = await arena.call("GET", "/streams/sums/tasks")
    assert (status, len(listed["items"])) == (200, 3)
