"""Megatron-Core beside the plain backend: the same weights there and back, the same gradients, its own checkpoints."""

import msgspec
import numpy as np
import pytest
import torch
from backend_case import (
    Case,
    assert_same_gradients,
    largest_difference,
    train_case,
    train_megatron,
)
from rank_processes import run_ranks
from safetensors.torch import load_file
from training_case import SPEC
from transformers import AutoModelForCausalLM

from stages.learning.losses.config import LossConfig
from stages.learning.losses.kl import KlPenalty
from stages.policy.tiny import make_policy_folder
from stages.training.megatron.convert import Heads, hf_from_megatron, megatron_from_hf, shard
from stages.training.ranks import single_rank

pytest.importorskip("megatron.core")


@pytest.fixture
def case(tmp_path):
    make_policy_folder(tmp_path / "policy", msgspec.structs.replace(SPEC, num_heads=4, num_kv_heads=2, head_dim=16))
    return Case(folder=str(tmp_path))


def plain(case):
    """The plain backend's gradients in order of the HF names."""
    found = train_case(single_rank(), case)
    model = AutoModelForCausalLM.from_pretrained(f"{case.folder}/policy")
    names = [name for name, _ in model.named_parameters()]
    order = sorted(range(len(names)), key=names.__getitem__)
    return msgspec.structs.replace(found, gradients=[[update[i] for i in order] for update in found.gradients])


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_weights_go_to_megatron_and_back_unchanged(case, num_ranks):
    whole = load_file(f"{case.folder}/policy/model.safetensors")
    heads = Heads(num_kv_heads=2 // num_ranks, head_size=16)
    for rank in range(num_ranks):
        part = {name: shard(tensor, name, rank, num_ranks) for name, tensor in whole.items()}
        there = megatron_from_hf(part, heads)
        assert there["decoder.layers.0.self_attention.linear_qkv.weight"].shape == (8 * 16 // num_ranks, 32)
        back = hf_from_megatron(there, heads)
        assert part["model.layers.0.self_attn.q_proj.weight"].shape == (4 * 16 // num_ranks, 32)
        assert back.keys() == part.keys()
        assert all(torch.equal(back[name], part[name]) for name in part)


@pytest.mark.parametrize(("num_ranks", "tensor_parallel"), [(1, 1), (2, 1), (2, 2)])
def test_gradients_are_those_of_the_plain_backend(tmp_path, case, num_ranks, tensor_parallel):
    found = run_ranks(num_ranks, train_megatron, case, tensor_parallel, store=tmp_path / "store")
    alone = plain(case)
    assert_same_gradients(found[0], alone)
    assert largest_difference([found[0].weights[k] for k in alone.weights], [*alone.weights.values()]) < 1e-5
    for name in ("grad_norm", "loss", "step_loss"):
        assert found[0].stats[0][name] == pytest.approx(alone.stats[0][name], abs=1e-5)
    if tensor_parallel == 2:
        assert [one.num_rows for one in found] == [14, 14]


def test_a_data_parallel_rank_without_rows_takes_part_with_nothing(tmp_path, case):
    few = msgspec.structs.replace(case, num_rows=1, mini_batches=1)
    found = run_ranks(2, train_megatron, few, 1, store=tmp_path / "store")
    assert sorted(one.num_rows for one in found) == [0, 1]
    assert_same_gradients(found[0], plain(few))


def test_entropy_reference_and_other_budgets_change_no_gradient(tmp_path, case):
    penalised = msgspec.structs.replace(
        case, loss=LossConfig(kl_penalty=KlPenalty(coef=0.1), entropy_coef=0.01, proximal="recompute")
    )
    found = run_ranks(2, train_megatron, msgspec.structs.replace(penalised, budget=60), 2, store=tmp_path / "store")
    assert_same_gradients(found[0], plain(penalised))


def test_a_checkpoint_of_two_tensor_parallel_ranks_is_continued_by_one(tmp_path, case):
    straight = plain(msgspec.structs.replace(case, last_step=2))
    kept = msgspec.structs.replace(case, checkpoint_every=1)
    run_ranks(2, train_megatron, kept, 2, store=tmp_path / "store")
    found = run_ranks(1, train_megatron, msgspec.structs.replace(kept, last_step=2), 1, store=tmp_path / "store")
    assert found[0].resumed == 1
    assert largest_difference([found[0].weights[k] for k in straight.weights], [*straight.weights.values()]) < 1e-6
    assert all(np.isfinite(w).all() for w in found[0].weights.values())
