"""Megatron-Core beside the plain backend: the same weights there and back, the same gradients, its own checkpoints."""

import json
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from backend_case import assert_same_gradients, largest_difference, train_megatron
from megatron_case import plain, tiny_case
from rank_processes import run_ranks
from safetensors.torch import load_file, save_file
from training_case import SPEC

from stages.learning.losses.config import LossConfig
from stages.learning.losses.kl import KlPenalty
from stages.policy.tiny import make_policy_folder
from stages.training.errors import TrainingError
from stages.training.megatron.convert import Heads, Stage, hf_from_megatron, megatron_from_hf, of_stage, shard

pytest.importorskip("megatron.core")


from stages.training.megatron.model import check_shape, read_shape


@pytest.fixture
def case(tmp_path):
    return tiny_case(tmp_path)


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


def test_a_weight_that_the_layers_have_no_place_for_is_not_passed_over(case):
    whole = load_file(f"{case.folder}/policy/model.safetensors")
    whole["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(64)
    with pytest.raises(KeyError, match=r"q_proj\.bias"):
        megatron_from_hf(whole, Heads(num_kv_heads=2, head_size=16))


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"rope_parameters": None, "rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope_type default, found yarn"),
        ({"rope_parameters": {"rope_theta": 1e6, "rope_type": "linear"}}, "rope_type default, found linear"),
        ({"attention_bias": True}, "attention_bias False, found True"),
        ({"use_sliding_window": True}, "use_sliding_window False, found True"),
        ({"hidden_act": "gelu"}, "hidden_act silu, found gelu"),
    ],
)
def test_a_qwen3_that_these_layers_would_compute_otherwise_is_refused(case, changed, words):
    path = Path(case.folder) / "policy" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text("utf-8")) | changed), encoding="utf-8")
    with pytest.raises(TrainingError, match=words):
        check_shape(read_shape(str(path.parent)), 1, 1)


@pytest.mark.parametrize("is_tied", [True, False])
def test_stages_have_each_weight_once_but_for_a_tied_embedding(case, is_tied):
    whole = load_file(f"{case.folder}/policy/model.safetensors")
    if not is_tied:
        whole["lm_head.weight"] = whole["model.embed_tokens.weight"] + 1
    heads, places = Heads(num_kv_heads=2, head_size=16), []
    for rank in range(2):
        stage = Stage.of(rank, 2, num_layers=2, is_tied=is_tied)
        part = of_stage(whole, stage)
        there = megatron_from_hf(part, heads, stage)
        assert "decoder.layers.0.mlp.linear_fc1.weight" in there
        assert "decoder.layers.1.mlp.linear_fc1.weight" not in there
        assert ("output_layer.weight" in there) == (rank == 1)
        back = hf_from_megatron(there, heads, stage)
        assert back.keys() == part.keys()
        assert all(torch.equal(back[name], whole[name]) for name in part)
        places += part
    assert set(places) == set(whole)
    assert {name for name in places if places.count(name) > 1} == ({"model.embed_tokens.weight"} if is_tied else set())


LAYOUTS = [(1, 1, 1), (2, 1, 1), (2, 2, 1), (2, 1, 2)]
"""Ranks, tensor-parallel, pipeline-parallel."""


def check_layout(tmp_path, case, num_ranks, tensor_parallel, pipeline_parallel):
    found = run_ranks(num_ranks, train_megatron, case, tensor_parallel, pipeline_parallel, store=tmp_path / "store")
    alone = plain(case)
    assert found[0].names == alone.names
    assert_same_gradients(found[0], alone)
    assert largest_difference([found[0].weights[k] for k in alone.weights], [*alone.weights.values()]) < 1e-5
    for name in ("grad_norm", "loss", "step_loss", "mismatch/max"):
        assert found[0].stats[0][name] == pytest.approx(alone.stats[0][name], abs=1e-5)
    if num_ranks == tensor_parallel * pipeline_parallel:
        assert [one.num_rows for one in found] == [14] * num_ranks


@pytest.mark.parametrize(("num_ranks", "tensor_parallel", "pipeline_parallel"), LAYOUTS)
def test_gradients_are_those_of_the_plain_backend(tmp_path, case, num_ranks, tensor_parallel, pipeline_parallel):
    check_layout(tmp_path, case, num_ranks, tensor_parallel, pipeline_parallel)


@pytest.mark.nightly
@pytest.mark.parametrize(("tensor_parallel", "pipeline_parallel"), [(2, 2), (1, 2), (1, 4)])
def test_four_ranks_divide_the_model_in_both_ways(tmp_path, case, tensor_parallel, pipeline_parallel):
    deeper = msgspec.structs.replace(SPEC, num_heads=4, num_kv_heads=2, head_dim=16, num_layers=4)
    make_policy_folder(tmp_path / "policy", deeper)
    check_layout(tmp_path, case, 4, tensor_parallel, pipeline_parallel)


def test_stages_with_an_output_matrix_of_its_own(tmp_path, case):
    folder = tmp_path / "policy"
    weights = load_file(folder / "model.safetensors")
    embedding = weights["model.embed_tokens.weight"]
    weights["lm_head.weight"] = 0.2 * torch.randn(embedding.shape, generator=torch.Generator().manual_seed(1))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    check_layout(tmp_path, case, 2, 1, 2)


def test_layers_that_stages_cannot_share_are_refused(tmp_path, case):
    make_policy_folder(tmp_path / "policy", msgspec.structs.replace(SPEC, num_layers=3))
    with pytest.raises(
        AssertionError, match=r"pipeline_parallel = 2 doesn't divide the model's num_hidden_layers \(3\)"
    ):
        run_ranks(2, train_megatron, case, 1, 2, store=tmp_path / "store")


def test_a_data_parallel_rank_without_rows_takes_part_with_nothing(tmp_path, case):
    few = msgspec.structs.replace(case, num_rows=1, mini_batches=1)
    found = run_ranks(2, train_megatron, few, 1, store=tmp_path / "store")
    assert sorted(one.num_rows for one in found) == [0, 1]
    assert_same_gradients(found[0], plain(few))


@pytest.mark.nightly
def test_pipelines_without_rows_take_part_with_nothing(tmp_path, case):
    few = msgspec.structs.replace(case, num_rows=1, mini_batches=1)
    found = run_ranks(4, train_megatron, few, 1, 2, store=tmp_path / "store")
    assert sorted(one.num_rows for one in found) == [0, 0, 1, 1]
    assert_same_gradients(found[0], plain(few))


@pytest.mark.parametrize(("tensor_parallel", "pipeline_parallel"), [(2, 1), (1, 2)])
def test_entropy_reference_and_other_budgets_change_no_gradient(tmp_path, case, tensor_parallel, pipeline_parallel):
    penalised = msgspec.structs.replace(
        case, loss=LossConfig(kl_penalty=KlPenalty(coef=0.1), entropy_coef=0.01, proximal="recompute")
    )
    other = msgspec.structs.replace(penalised, budget=60)
    found = run_ranks(2, train_megatron, other, tensor_parallel, pipeline_parallel, store=tmp_path / "store")
    assert_same_gradients(found[0], plain(penalised))


@pytest.mark.parametrize(
    ("before", "after"),
    [((2, 2, 1), (1, 1, 1)), ((2, 1, 2), (1, 1, 1)), ((1, 1, 1), (2, 1, 2)), ((2, 1, 2), (2, 2, 1))],
)
def test_a_checkpoint_is_continued_by_ranks_that_share_the_model_otherwise(tmp_path, case, before, after):
    straight = plain(msgspec.structs.replace(case, last_step=2))
    kept = msgspec.structs.replace(case, checkpoint_every=1)
    run_ranks(before[0], train_megatron, kept, *before[1:], store=tmp_path / "store")
    further = msgspec.structs.replace(kept, last_step=2)
    found = run_ranks(after[0], train_megatron, further, *after[1:], store=tmp_path / "store")
    assert [one.resumed for one in found] == [1] * after[0]
    assert largest_difference([found[0].weights[k] for k in straight.weights], [*straight.weights.values()]) < 1e-6
    assert all(np.isfinite(w).all() for w in found[0].weights.values())
