"""With a real policy and the built-in engine: what the gateway records is what the engine samples, token for token, turn for turn.

A policy with random weights writes bytes that no text encodes to: had any answer been encoded again, its ids would differ.
"""

import numpy as np
import pytest
from gateway_fakes import house

from stages.engine.builtin import BuiltinEngineSettings, builtin_engine
from stages.gateway.settings import OverridePolicy, RunSampling
from stages.policy.tiny import PolicySpec, make_policy_folder
from stages.policy.tokenizer import load_tokenizer
from stages.ports import GenerateRequest, SamplingSettings
from stages.rewards.forest import build_rows

TOOLS = [{"type": "function", "function": {"name": "look", "description": "d", "parameters": {"type": "object"}}}]
NUM_CONVERSATIONS = 6
NUM_TURNS = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("policy")
    # Wide weights: greedy answers wander over many bytes instead of repeating one.
    spec = PolicySpec(
        hidden_size=32, intermediate_size=32, num_layers=1, num_heads=1, num_kv_heads=1, max_context=2048, init_std=1.0
    )
    make_policy_folder(path, spec)
    return path


async def test_greedy_tokens_and_log_probs_through_the_gateway_are_the_engines_own(folder):
    tokenizer = load_tokenizer(folder)
    async with builtin_engine("e0", folder, BuiltinEngineSettings()) as engine:
        sampling = RunSampling(policy=OverridePolicy.HONOUR, max_new_tokens=24)
        home = house(engine, tokenizer=tokenizer, context_length=2048, sampling=sampling)
        drift = 0
        for number in range(NUM_CONVERSATIONS):
            session = f"s{number}"
            await _converse(home, session, number)
            records = home.recorder.interactions(session)
            assert [one.parent for one in records] == [None, *range(NUM_TURNS - 1)]
            for record, tokens in zip(records, await home.tokens(session), strict=True):
                sampled = tokens.completion_ids.as_numpy()
                whole = np.array(await home.chain(session, record.ordinal), dtype=np.int32)
                ids, logprobs = await _direct(engine, tokenizer, whole[: whole.size - sampled.size], sampled.size)
                assert sampled.tolist() == ids
                np.testing.assert_allclose(tokens.logprobs.as_numpy(), logprobs, atol=1e-4)
                drift += tokenizer.encode(tokenizer.decode(sampled)).tolist() != sampled.tolist()
            (row,) = build_rows(records, dict(enumerate(await home.tokens(session))))
            assert row.token_ids.tolist() == await home.chain(session, NUM_TURNS - 1)
        # The policy does write what encoding would change: this test would see it.
        assert drift > 0
    assert home.gateway.counts.prefix_breaks == home.gateway.counts.engine_faults == 0


async def _converse(home, session, number):
    ticket = await home.gateway.open_session(session)
    messages = [{"role": "system", "content": f"Task {number}."}, {"role": "user", "content": "Go."}]
    async with home.http(ticket.token) as client:
        for turn in range(NUM_TURNS):
            body = {"messages": messages, "tools": TOOLS, "temperature": 0, "stream": False}
            response = await client.post("/v1/chat/completions", json=body)
            assert response.status_code == 200, response.text
            messages.append(response.json()["choices"][0]["message"])
            role = {"role": "tool", "tool_call_id": "t"} if turn % 2 else {"role": "user"}
            messages.append({**role, "content": f"result {turn}"})


async def _direct(engine, tokenizer, prompt_ids, num_tokens):
    """The engine's own greedy answer to a prompt."""
    settings = SamplingSettings(temperature=0.0, max_new_tokens=num_tokens, stop_token_ids=tokenizer.stop_token_ids)
    ids, logprobs = [], []
    async for chunk in engine.generate(GenerateRequest(request_id="direct", prompt_ids=prompt_ids, settings=settings)):
        ids += chunk.token_ids.tolist()
        logprobs += chunk.logprobs.tolist()
    return ids, logprobs
