"""The sampler and its forward against transformers, and its behaviour when requests come, go and weights change."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from stages.learning.draw import draw, logprobs_at
from stages.learning.qwen3 import (
    KvCache,
    ModelShape,
    ShapeError,
    Weights,
    expected_tensors,
    forward,
    fuse,
    shape_from_config,
)
from stages.learning.sampler import Finish, Sampled, Sampler, SampleRequest
from stages.policy.tiny import PolicySpec, make_policy_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("policy")
    make_policy_folder(
        path, PolicySpec(hidden_size=64, intermediate_size=96, num_layers=2, init_std=0.3, max_context=256)
    )
    return path


@pytest.fixture(scope="module")
def weights(folder) -> Weights:
    shape = shape_from_config(json.loads((folder / "config.json").read_text()))
    return fuse(shape, load_file(folder / "model.safetensors"))


@pytest.fixture(scope="module")
def reference(folder):
    return AutoModelForCausalLM.from_pretrained(folder).eval()


def perturbed(weights: Weights) -> tuple[Weights, dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(7)
    state = {n: torch.randn(s, generator=generator) * 0.3 for n, s in expected_tensors(weights.shape).items()}
    return fuse(weights.shape, state), state


def request(name: str, prompt, n: int = 8, **settings) -> SampleRequest:
    return SampleRequest(
        request_id=name, prompt_ids=np.array(prompt, dtype=np.int32), max_new_tokens=n, **{"seed": 1, **settings}
    )


def run(sampler: Sampler) -> dict[str, list[Sampled]]:
    found: dict[str, list[Sampled]] = {}
    while sampler.num_running:
        for token in sampler.step():
            found.setdefault(token.request_id, []).append(token)
    return found


def reference_logprobs(model, prompt, tokens, temperature: float = 1.0) -> list[float]:
    ids = torch.tensor([[*prompt, *tokens]])
    with torch.no_grad():
        logp = logprobs_at(model(ids).logits[0], temperature)
    return [float(logp[len(prompt) - 1 + i, t]) for i, t in enumerate(tokens)]


def test_the_forward_equals_transformers_in_any_split_of_the_tokens(weights, reference):
    ids = torch.randint(0, 264, (3, 41), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        expected = reference(ids).logits
        cache = KvCache(weights.shape, 5, capacity=8)
        parts, start = [], 0
        for size in (1, 13, 20, 7):
            parts.append(forward(weights, cache, ids[:, start : start + size], torch.full((3,), start), 1))
            start += size
        found = torch.nn.functional.linear(torch.cat(parts, dim=1), weights.head_VD)
    assert torch.allclose(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
def test_logprobs_equal_those_of_the_whole_sequence_at_the_temperature(weights, reference, temperature):
    sampler = Sampler(weights, num_slots=4)
    prompts = {f"r{i}": list(range(5 + i, 12 + 3 * i)) for i in range(4)}
    for i, (name, prompt) in enumerate(prompts.items()):
        sampler.add(request(name, prompt, 6 + i, temperature=temperature, seed=i))
    for name, tokens in run(sampler).items():
        expected = reference_logprobs(reference, prompts[name], [t.token_id for t in tokens], temperature)
        assert np.allclose([t.logprob for t in tokens], expected, atol=1e-4)


def test_what_a_request_gets_does_not_depend_on_its_neighbours(weights):
    alone = Sampler(weights, num_slots=8)
    alone.add(request("a", range(20), 12, seed=5))
    expected = [t.token_id for t in run(alone)["a"]]
    crowd = Sampler(weights, num_slots=8)
    crowd.add(request("x", range(3), 2, seed=1))
    crowd.step()
    crowd.add(request("a", range(20), 12, seed=5))
    crowd.add(request("y", range(50, 90), 30, seed=2))
    assert [t.token_id for t in run(crowd)["a"]] == expected


def test_a_stop_token_ends_a_request_and_is_part_of_it(weights):
    sampler = Sampler(weights, num_slots=1)
    sampler.add(request("a", range(4), 50, stop_token_ids=frozenset(range(0, 264, 2))))
    tokens = run(sampler)["a"]
    assert tokens[-1].finish is Finish.STOP
    assert tokens[-1].token_id % 2 == 0
    assert all(t.token_id % 2 for t in tokens[:-1])


def test_a_long_prompt_is_cached_in_pieces_with_the_same_result(weights):
    found = []
    for budget in (7, 4096):
        sampler = Sampler(weights, num_slots=3, prefill_tokens=budget)
        for i in range(3):
            sampler.add(request(f"r{i}", range(i, 60 + 20 * i), 4, seed=i))
        found.append({name: [t.token_id for t in tokens] for name, tokens in run(sampler).items()})
    assert found[0] == found[1]


def test_an_abort_frees_the_slot_and_leaves_the_others_as_they_were(weights):
    expected = None
    for abort in (False, True):
        sampler = Sampler(weights, num_slots=3)
        for i in range(3):
            sampler.add(request(f"r{i}", range(i, 10 + i), 9, seed=i))
        tokens = [t for t in sampler.step() if t.request_id == "r2"]
        if abort:
            assert [t.finish for t in sampler.abort("r0")] == [Finish.ABORT]
            assert sampler.abort("nobody") == []
            assert sampler.num_free == 1
        tokens += run(sampler)["r2"]
        ids = [t.token_id for t in tokens]
        expected = expected or ids
        assert ids == expected


def test_after_a_swap_with_recompute_logprobs_are_those_of_the_new_weights(weights, folder, reference):
    new, state = perturbed(weights)
    sampler = Sampler(weights, num_slots=2, version=3)
    prompt = list(range(30, 50))
    sampler.add(request("a", prompt, 10))
    tokens = [t for _ in range(4) for t in sampler.step()]
    sampler.swap(new, 4, recompute=True)
    tokens += run(sampler)["a"]
    assert [t.version for t in tokens] == [3] * 4 + [4] * 6
    changed = AutoModelForCausalLM.from_pretrained(folder).eval()
    changed.load_state_dict(state, strict=False)
    ids = [t.token_id for t in tokens]
    assert np.allclose([t.logprob for t in tokens[:4]], reference_logprobs(reference, prompt, ids)[:4], atol=1e-4)
    assert np.allclose([t.logprob for t in tokens[4:]], reference_logprobs(changed, prompt, ids)[4:], atol=1e-4)


def test_a_swap_in_place_keeps_the_old_keys_and_values(weights):
    new, _ = perturbed(weights)
    kept, exact = ([], [])
    for found, recompute in ((kept, False), (exact, True)):
        sampler = Sampler(weights, num_slots=1)
        sampler.add(request("a", range(30, 60), 6))
        sampler.step()
        sampler.swap(new, 1, recompute=recompute)
        found += [t.logprob for t in run(sampler)["a"]]
    assert kept != exact


def test_weights_that_do_not_fit_are_refused_by_name(weights):
    state = {name: torch.zeros(size) for name, size in expected_tensors(weights.shape).items()}
    state["model.norm.weight"] = torch.zeros(3)
    with pytest.raises(ShapeError, match=r"model\.norm\.weight has shape \(3,\)"):
        fuse(weights.shape, state)
    del state["model.norm.weight"]
    with pytest.raises(ShapeError, match="missing"):
        fuse(weights.shape, state)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "llama"}, "qwen3"),
        ({"attention_bias": True}, "attention bias"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rotary"),
        ({"hidden_size": None}, "hidden_size"),
    ],
)
def test_another_architecture_is_refused(folder, change, message):
    config = json.loads((folder / "config.json").read_text())
    with pytest.raises(ShapeError, match=message):
        shape_from_config({**config, **change})
    assert isinstance(shape_from_config(config), ModelShape)


def test_draws_follow_the_distribution():
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0]).expand(20_000, 4)
    uniform = torch.rand(20_000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    temperature = torch.full((20_000,), 0.8)
    ids, logp = draw(logits, temperature, None, None, uniform)
    expected = (logits[0] / 0.8).softmax(-1)
    assert torch.allclose(torch.bincount(ids, minlength=4) / 20_000, expected, atol=0.01)
    assert torch.allclose(logp.exp(), expected[ids], atol=1e-6)


def test_top_k_top_p_and_greedy_narrow_the_draw_and_not_the_logprob():
    logits = torch.tensor([0.0, 3.0, 2.0, -1.0]).expand(300, 4)
    uniform = torch.linspace(0, 0.9999, 300, dtype=torch.float64)
    one = torch.ones(300)
    full = logits[0].log_softmax(-1)
    ids, logp = draw(logits, one, None, torch.full((300,), 2), uniform)
    assert set(ids.tolist()) == {1, 2}
    assert torch.allclose(logp, full[ids])
    ids, _ = draw(logits, one, torch.full((300,), 0.5), None, uniform)
    assert set(ids.tolist()) == {1}
    ids, logp = draw(logits, torch.zeros(300), None, None, uniform)
    assert set(ids.tolist()) == {1}
    assert torch.allclose(logp, full[1].expand(300))


def test_a_token_of_probability_zero_is_never_drawn():
    logits = torch.tensor([[float("-inf"), 0.0, float("-inf"), 0.0]]).expand(2, 4)
    ids, _ = draw(logits, torch.ones(2), None, None, torch.tensor([0.0, 0.5], dtype=torch.float64))
    assert ids.tolist() == [1, 3]
