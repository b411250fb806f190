"""Critic, adapters and recomputed activations over Megatron-Core beside the plain backend's."""

import json
from pathlib import Path

import msgspec
import numpy as np
import pytest
from backend_case import OPTIMIZER, Case, assert_same_gradients, largest_difference, settings_of, train_megatron
from megatron_case import plain, tiny_case
from rank_processes import run_ranks
from safetensors.torch import load_file
from training_case import plan, step_of

from stages.engine.adapter import merged as put_on
from stages.learning.losses.config import LossConfig
from stages.learning.losses.kl import KlPenalty
from stages.learning.losses.ppo import Ppo
from stages.learning.normalise import TokenNormalisation
from stages.learning.token_rewards import GaeLambda
from stages.training.backends import ModelSettings
from stages.training.critic import CriticSettings
from stages.training.errors import TrainingError
from stages.training.lora import LoraSettings
from stages.training.ranks import Ranks, single_rank
from stages.training.token_advantages import AdvantageSettings

pytest.importorskip("megatron.core")

CRITIC = CriticSettings(optimizer=msgspec.structs.replace(OPTIMIZER, lr=1e-2))
PPO = AdvantageSettings(
    discount=0.99,
    gae_lambda=GaeLambda(value=0.9),
    kl_reward=KlPenalty(coef=0.05, estimator="k1"),
    normalisation=TokenNormalisation(),
)
LAYOUTS = [(1, 1, 1), (2, 1, 1), (2, 2, 1), (2, 1, 2)]
"""Ranks, tensor-parallel, pipeline-parallel."""


@pytest.fixture
def case(tmp_path):
    return tiny_case(tmp_path)


def with_critic(case):
    loss = LossConfig(method=Ppo(), kl_penalty=KlPenalty(coef=0.1))
    models = ModelSettings(critic=CRITIC, advantages=PPO)
    return msgspec.structs.replace(case, algorithm="gae", loss=loss, models=models)


def with_adapters(case, **changes):
    lora = LoraSettings(rank=4, alpha=8, **changes)
    loss = LossConfig(kl_penalty=KlPenalty(coef=0.1))  # the reference is the model below the adapters
    return msgspec.structs.replace(case, loss=loss, models=ModelSettings(lora=lora), last_step=2)


@pytest.mark.parametrize(("num_ranks", "tensor_parallel", "pipeline_parallel"), LAYOUTS)
def test_a_critic_gives_the_plain_backends_gradients_and_statistics(
    tmp_path, case, num_ranks, tensor_parallel, pipeline_parallel
):
    ppo = msgspec.structs.replace(with_critic(case), last_step=2)
    found = run_ranks(num_ranks, train_megatron, ppo, tensor_parallel, pipeline_parallel, store=tmp_path / "store")
    alone = plain(ppo)
    assert found[0].names == alone.names
    assert len(alone.names) == 8
    assert "value_head.bias" in alone.names[0]
    assert_same_gradients(found[0], alone)
    for mine, other in zip(found[0].stats, alone.stats, strict=True):
        assert mine.keys() == other.keys()
        for name in ("critic_loss", "value_error_squared", "critic_grad_norm", "kl_reward", "advantage", "grad_norm"):
            assert mine[name] == pytest.approx(other[name], abs=1e-4), name


@pytest.mark.parametrize(("num_ranks", "tensor_parallel", "pipeline_parallel"), LAYOUTS)
def test_adapters_with_the_base_as_reference_give_the_plain_backends_gradients(
    tmp_path, case, num_ranks, tensor_parallel, pipeline_parallel
):
    tuned = with_adapters(case)
    found = run_ranks(num_ranks, train_megatron, tuned, tensor_parallel, pipeline_parallel, store=tmp_path / "store")
    alone = plain(tuned)
    assert found[0].names == alone.names
    assert all(".lora_" in name for name in alone.names[0])
    assert_same_gradients(found[0], alone)
    assert largest_difference([found[0].weights[k] for k in alone.weights], [*alone.weights.values()]) < 1e-5
    assert found[0].stats[1]["kl_to_reference"] == pytest.approx(alone.stats[1]["kl_to_reference"], abs=1e-6)
    assert alone.stats[1]["kl_to_reference"] > 1e-6


def test_adapters_on_some_projections_of_fused_matrices(tmp_path, case):
    some = with_adapters(case, targets=("k_proj", "up_proj", "o_proj"))
    found = run_ranks(2, train_megatron, some, 2, store=tmp_path / "store")
    alone = plain(some)
    assert found[0].names == alone.names
    assert_same_gradients(found[0], alone)


@pytest.mark.parametrize(("tensor_parallel", "pipeline_parallel"), [(2, 1), (1, 2)])
def test_activations_computed_again_change_nothing(tmp_path, case, tensor_parallel, pipeline_parallel):
    again = msgspec.structs.replace(case, models=ModelSettings(activation_checkpointing=True))
    found, kept = (
        run_ranks(2, train_megatron, one, tensor_parallel, pipeline_parallel, store=tmp_path / "store")[0]
        for one in (again, case)
    )
    assert largest_difference([*found.weights.values()], [*kept.weights.values()]) == 0
    assert_same_gradients(found, plain(case))


@pytest.mark.parametrize(("is_asked", "passes"), [(False, 1), (True, 2)])
def test_activations_are_computed_again_where_that_is_asked(case, monkeypatch, is_asked, passes):
    from stages.training.megatron import model  # noqa: PLC0415 - slow to import

    calls = []
    attend = model.PackedCoreAttention.forward
    monkeypatch.setattr(
        model.PackedCoreAttention, "forward", lambda *args, **kw: calls.append(1) or attend(*args, **kw)
    )
    models = ModelSettings(activation_checkpointing=is_asked)
    train_megatron(single_rank(), msgspec.structs.replace(case, models=models, mini_batches=1, budget=10_000), 1)
    num_layers = 2
    assert len(calls) == num_layers * passes


@pytest.mark.nightly
@pytest.mark.parametrize("with_models", [with_critic, with_adapters])
def test_four_ranks_divide_critics_and_adapters_in_both_ways(tmp_path, case, with_models):
    both = with_models(case)
    found = run_ranks(4, train_megatron, both, 2, 2, store=tmp_path / "store")
    alone = plain(both)
    assert found[0].names == alone.names
    assert_same_gradients(found[0], alone)


@pytest.mark.parametrize(("before", "after"), [((2, 2, 1), (2, 1, 2)), ((2, 1, 2), (1, 1, 1))])
@pytest.mark.parametrize("with_models", [with_critic, with_adapters])
def test_critics_and_adapters_go_on_from_a_checkpoint_of_another_division(tmp_path, case, with_models, before, after):
    whole = msgspec.structs.replace(with_models(case), last_step=2)
    straight = plain(whole)
    kept = msgspec.structs.replace(whole, checkpoint_every=1, last_step=1)
    run_ranks(before[0], train_megatron, kept, *before[1:], store=tmp_path / "store")
    further = msgspec.structs.replace(kept, last_step=2)
    found = run_ranks(after[0], train_megatron, further, *after[1:], store=tmp_path / "store")
    assert [one.resumed for one in found] == [1] * after[0]
    assert largest_difference([found[0].weights[k] for k in straight.weights], [*straight.weights.values()]) < 1e-5
    assert all(np.isfinite(w).all() for w in found[0].weights.values())
    if with_models is with_critic:
        assert found[0].stats[0]["critic_loss"] == pytest.approx(straight.stats[1]["critic_loss"], abs=1e-5)


def export_adapter(ranks: Ranks, case: Case, tensor_parallel: int, pipeline_parallel: int) -> None:
    from stages.training.megatron.backend import (  # noqa: PLC0415 - slow to import
        MegatronSettings,
        open_megatron_backend,
    )

    megatron = MegatronSettings(tensor_parallel=tensor_parallel, pipeline_parallel=pipeline_parallel)
    with open_megatron_backend(settings_of(case), case.models, plan(case.budget), ranks, megatron) as backend:
        for number in (1, 2):
            manifest, rows = step_of(number)
            backend.train(manifest, {i: rows[i] for i in backend.rows_needed(manifest)})
        backend.export_weights(str(Path(case.folder) / "whole"))
        backend._settings = msgspec.structs.replace(backend._settings, adapter_only=True)
        backend.export_weights(str(Path(case.folder) / "alone"))


@pytest.mark.parametrize(("tensor_parallel", "pipeline_parallel"), [(2, 1), (1, 2)])
def test_an_adapter_is_exported_as_peft_reads_it(tmp_path, case, tensor_parallel, pipeline_parallel):
    run_ranks(2, export_adapter, with_adapters(case), tensor_parallel, pipeline_parallel, store=tmp_path / "store")
    config = json.loads((tmp_path / "alone" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["peft_type"]) == (4, 8, "LORA")
    base = load_file(tmp_path / "policy" / "model.safetensors")
    merged, whole = put_on(base, tmp_path / "alone"), load_file(tmp_path / "whole" / "model.safetensors")
    assert merged.keys() == whole.keys() == base.keys()
    changed = {name for name in base if not np.array_equal(base[name], whole[name])}
    assert changed == {name for name in base if "proj" in name}
    worst = max(float((merged[name] - whole[name]).abs().max()) for name in whole)
    assert worst < 1e-6


@pytest.mark.parametrize(
    ("models", "words"),
    [
        (ModelSettings(lora=LoraSettings(targets=("q_proj", "embed"))), r"adapts q_proj, .*found \['embed'\]"),
        (ModelSettings(lora=LoraSettings(targets=())), r"training.lora.targets = \[\]"),
        (ModelSettings(critic=CriticSettings(folder="nowhere")), "critic model: nowhere: expected the config.json"),
    ],
)
def test_what_cannot_be_is_refused_by_name(case, models, words):
    with pytest.raises(TrainingError, match=words):
        train_megatron(single_rank(), msgspec.structs.replace(case, models=models), 1)


def test_dropout_over_divided_inputs_is_refused(tmp_path, case):
    dropping = msgspec.structs.replace(case, models=ModelSettings(lora=LoraSettings(dropout=0.1)))
    with pytest.raises(AssertionError, match=r"training\.lora\.dropout = 0\.1: ranks that share a matrix"):
        run_ranks(2, train_megatron, dropping, 2, store=tmp_path / "store")
