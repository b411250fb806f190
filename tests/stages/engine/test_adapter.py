"""LoRA adapters on the built-in engine: the same numbers as merged weights, and nothing that doesn't belong."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from stages.engine.adapter import merged
from stages.engine.builtin import BuiltinEngineSettings, builtin_engine
from stages.policy.tiny import PolicySpec, make_policy_folder
from stages.ports import GenerateRequest, SamplingSettings, SwapMode, TakesAdapters, WeightsRefusedError

SPEC = PolicySpec(hidden_size=32, intermediate_size=48, num_layers=1, num_heads=2, num_kv_heads=1, max_context=256)
STEM = "base_model.model.model.layers.0.mlp.up_proj"
RANK = 3


@pytest.fixture(scope="module")
def policy(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("policy")
    make_policy_folder(folder, SPEC)
    return folder


def write_adapter(folder: Path, *, tensors=None, **changes) -> Path:
    generator = torch.Generator().manual_seed(3)
    found = {
        f"{STEM}.lora_A.weight": torch.randn(RANK, 32, generator=generator),
        f"{STEM}.lora_B.weight": torch.randn(48, RANK, generator=generator),
    }
    folder.mkdir(exist_ok=True)
    save_file(found if tensors is None else tensors(found), folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": 6, "target_modules": ["up_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config | changes))
    return folder


async def greedy(engine, name: str, min_version: int = 0) -> tuple[list[int], list[float]]:
    request = GenerateRequest(
        request_id=name,
        prompt_ids=np.arange(8, dtype=np.int32),
        settings=SamplingSettings(temperature=0.0, max_new_tokens=12),
        min_version=min_version,
    )
    ids, logprobs = [], []
    async for chunk in engine.generate(request):
        ids += chunk.token_ids.tolist()
        logprobs += chunk.logprobs.tolist()
    return ids, logprobs


async def test_an_adapter_gives_the_tokens_of_the_merged_weights(policy: Path, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "adapter")
    whole = tmp_path / "whole"
    make_policy_folder(whole, SPEC)
    save_file(merged(load_file(policy / "model.safetensors"), adapter), whole / "model.safetensors")
    async with builtin_engine("e", policy, BuiltinEngineSettings()) as engine:
        assert isinstance(engine, TakesAdapters)
        before = await greedy(engine, "before")
        await engine.load_adapter(str(adapter), 1, SwapMode.RECOMPUTE)
        adapted = await greedy(engine, "adapted", 1)
        await engine.load_weights(str(whole), 2, SwapMode.RECOMPUTE)
        assert await greedy(engine, "whole", 2) == adapted != before


async def test_each_version_is_put_on_the_first_weights_not_on_the_last_ones(policy: Path, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "adapter")
    async with builtin_engine("e", policy, BuiltinEngineSettings()) as engine:
        await engine.load_adapter(str(adapter), 1, SwapMode.RECOMPUTE)
        once = await greedy(engine, "a")
        await engine.load_adapter(str(adapter), 2, SwapMode.RECOMPUTE)
        assert await greedy(engine, "b") == once


def _other_shape(found):
    return {**found, f"{STEM}.lora_A.weight": torch.zeros(RANK, 31)}


@pytest.mark.parametrize(
    ("tensors", "changes", "text"),
    [
        (_other_shape, {}, "expected the shapes ((3, 32), (48, 3))"),
        (lambda found: {k: v for k, v in found.items() if "lora_A" in k}, {}, "lacks its B matrix"),
        (lambda found: {k.replace("up_proj", "side_proj"): v for k, v in found.items()}, {}, "does not have"),
        (lambda found: {**found, "base_model.model.lm_head.bias": torch.zeros(2)}, {}, "no part of a LoRA adapter"),
        (None, {"use_dora": True}, "use_dora = True"),
        (None, {"r": 0}, "expected at least 1"),
        (None, {"modules_to_save": ["lm_head"]}, "modules_to_save"),
        (None, {"r": "many"}, "expected a LoRA adapter"),
    ],
)
async def test_what_does_not_belong_on_the_model_leaves_the_old_weights_serving(
    policy: Path, tmp_path: Path, tensors, changes, text: str
) -> None:
    adapter = write_adapter(tmp_path / "adapter", tensors=tensors, **changes)
    async with builtin_engine("e", policy, BuiltinEngineSettings()) as engine:
        before = await greedy(engine, "a")
        with pytest.raises(WeightsRefusedError) as refused:
            await engine.load_adapter(str(adapter), 1, SwapMode.RECOMPUTE)
        assert text in str(refused.value)
        assert await greedy(engine, "b") == before
        assert (await engine.health()).version == 0


def test_rank_stabilised_adapters_are_scaled_by_the_root_of_the_rank(policy: Path, tmp_path: Path) -> None:
    state = load_file(policy / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    plain = merged(state, write_adapter(tmp_path / "plain"))[name] - state[name]
    rooted = merged(state, write_adapter(tmp_path / "rooted", use_rslora=True))[name] - state[name]
    assert torch.allclose(rooted, plain * RANK**0.5, atol=1e-5)
