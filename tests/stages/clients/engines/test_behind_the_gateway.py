"""The gateway in front of real servers: what it records is what the server itself says, token for token, turn for turn.

The policy has wide random weights: it writes bytes that no text encodes to, so an answer that was encoded again would differ.
"""

import json
import sys
import urllib.request
from pathlib import Path

import anyio
import anyio.to_thread
import numpy as np
import pytest
from real_servers import MAX_CONTEXT, SPEC

from schemas.config import EngineKind
from stages.clients.engines import http_engine
from stages.gateway.settings import OverridePolicy, RunSampling
from stages.policy.tiny import PolicySpec, make_policy_folder
from stages.policy.tokenizer import load_tokenizer
from stages.ports import SwapMode
from stages.rewards.forest import build_rows

sys.path.insert(0, str(Path(__file__).parents[2] / "gateway"))
from gateway_fakes import house

TOOLS = [{"type": "function", "function": {"name": "look", "description": "d", "parameters": {"type": "object"}}}]
NUM_TURNS = 4
AT_ONCE = 6


@pytest.fixture(scope="module")
def wide(tmp_path_factory) -> str:
    """Weights of the servers' model whose greedy answers wander over many bytes."""
    folder = tmp_path_factory.mktemp("wide")
    make_policy_folder(folder, PolicySpec(**{**SPEC, "init_std": 1.0}, seed=7))
    return str(folder)


async def converse(home, session: str) -> None:
    ticket = await home.gateway.open_session(session)
    messages = [{"role": "system", "content": f"Task of {session}."}, {"role": "user", "content": "Go."}]
    async with home.http(ticket.token) as client:
        for turn in range(NUM_TURNS):
            body = {"messages": messages, "tools": TOOLS, "temperature": 0, "stream": False}
            response = await client.post("/v1/chat/completions", json=body)
            assert response.status_code == 200, response.text
            messages.append(response.json()["choices"][0]["message"])
            role = {"role": "tool", "tool_call_id": "t"} if turn % 2 else {"role": "user"}
            messages.append({**role, "content": f"result {turn}"})


def servers_own(kind: EngineKind, url: str, prompt: list[int], num_tokens: int, stops: list[int]):
    """The server's greedy ids and log-probs, asked without a word of headrace's client."""
    if kind is EngineKind.VLLM:
        params = {"max_tokens": num_tokens, "temperature": 0, "logprobs": 0, "stop_token_ids": stops}
        choice = post(f"{url}/inference/v1/generate", {"token_ids": prompt, "sampling_params": params})["choices"][0]
        return choice["token_ids"], [entry["logprob"] for entry in choice["logprobs"]["content"]]
    params = {"max_new_tokens": num_tokens, "temperature": 0, "stop_token_ids": stops}
    answer = post(f"{url}/generate", {"input_ids": prompt, "sampling_params": params, "return_logprob": True})
    return answer["output_ids"], [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]


def post(url: str, body: dict) -> dict:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})  # noqa: S310 - loopback
    with urllib.request.urlopen(request, timeout=120) as answer:  # noqa: S310 - same
        return json.load(answer)


async def compare(kind: EngineKind, url: str, folder: str, num_conversations: int) -> None:
    tokenizer = load_tokenizer(folder)
    async with http_engine(kind, "e", url) as engine:
        await engine.load_weights(folder, (await engine.health()).version + 1, SwapMode.RECOMPUTE)
        sampling = RunSampling(policy=OverridePolicy.HONOUR, max_new_tokens=24)
        home = house(engine, tokenizer=tokenizer, context_length=MAX_CONTEXT, sampling=sampling)
        places = anyio.Semaphore(AT_ONCE)
        found = {"drift": 0, "largest": 0.0, "tokens": 0}

        async def one(number: int) -> None:
            async with places:
                await converse(home, f"s{number}")
                await check(home, f"s{number}")

        async def check(home, session: str) -> None:
            records = home.recorder.interactions(session)
            assert [one.parent for one in records] == [None, *range(NUM_TURNS - 1)]
            for record, tokens in zip(records, await home.tokens(session), strict=True):
                sampled = tokens.completion_ids.as_numpy()
                prompt = (await home.chain(session, record.ordinal))[: -sampled.size]
                ids, logprobs = await anyio.to_thread.run_sync(
                    servers_own, kind, url, prompt, sampled.size, list(tokenizer.stop_token_ids)
                )
                assert sampled.tolist() == ids
                np.testing.assert_allclose(tokens.logprobs.as_numpy(), logprobs, atol=1e-4)
                found["largest"] = max(found["largest"], float(np.abs(tokens.logprobs.as_numpy() - logprobs).max()))
                found["drift"] += tokenizer.encode(tokenizer.decode(sampled)).tolist() != sampled.tolist()
                found["tokens"] += sampled.size
            (row,) = build_rows(records, dict(enumerate(await home.tokens(session))))
            assert row.token_ids.tolist() == await home.chain(session, NUM_TURNS - 1), "tokens drifted"

        async with anyio.create_task_group() as tasks:
            for number in range(num_conversations):
                tasks.start_soon(one, number)
    # The policy does write what encoding would change: this test would see it.
    assert found["drift"] > 0
    assert home.gateway.counts.prefix_breaks == home.gateway.counts.engine_faults == 0
    print(f"{kind}: {num_conversations} conversations, {found}")  # noqa: T201 - the figures, with -s


@pytest.mark.resources
@pytest.mark.timeout(1500)
async def test_greedy_tokens_and_log_probs_through_the_gateway_are_the_servers_own(real, wide):
    await compare(*real, wide, 40)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
async def test_200_conversations_through_the_gateway_are_the_servers_own(real, wide):
    await compare(*real, wide, 200)
