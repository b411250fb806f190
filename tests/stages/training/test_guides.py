"""Reference, teacher, critic and adapters beside the policy: what they change, what they need, the same when split."""

import json
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from backend_case import (
    OPTIMIZER,
    Case,
    Recording,
    assert_same_gradients,
    largest_difference,
    policy_folder,
    settings_of,
    train_case,
)
from rank_processes import run_ranks
from safetensors.numpy import load_file
from safetensors.torch import load_file as load_torch
from training_case import SPEC, plan, step_of
from transformers import AutoModelForCausalLM

from stages.engine.adapter import merged as put_on
from stages.learning.losses.config import Distillation, LossConfig
from stages.learning.losses.kl import KlPenalty
from stages.learning.losses.ppo import Ppo
from stages.learning.normalise import TokenNormalisation
from stages.learning.token_rewards import GaeLambda
from stages.policy.tiny import make_policy_folder
from stages.training.backends import ModelSettings, hf_backend
from stages.training.critic import CriticSettings
from stages.training.errors import TrainingError
from stages.training.fsdp2_placement import Fsdp2Settings
from stages.training.lora import LoraSettings
from stages.training.placement import WholePlacement
from stages.training.ranks import single_rank
from stages.training.token_advantages import AdvantageSettings
from stages.weight_files.safetensors_file import read_folder

CRITIC = CriticSettings(optimizer=msgspec.structs.replace(OPTIMIZER, lr=1e-2))
PPO = AdvantageSettings(
    discount=0.99,
    gae_lambda=GaeLambda(value=0.9),
    kl_reward=KlPenalty(coef=0.05, estimator="k1"),
    normalisation=TokenNormalisation(),
)


@pytest.fixture
def case(tmp_path):
    policy_folder(tmp_path)
    return Case(folder=str(tmp_path))


def other_model(tmp_path, seed=5, **changes) -> str:
    make_policy_folder(tmp_path / "other", msgspec.structs.replace(SPEC, seed=seed, **changes))
    return str(tmp_path / "other")


def open_backend(case, **settings):
    placement = Recording(WholePlacement(single_rank()))
    changed = msgspec.structs.replace(settings_of(case), **settings)
    return hf_backend(changed, case.models, plan(case.budget), single_rank(), placement), placement


def with_models(case, **models):
    return msgspec.structs.replace(case, models=ModelSettings(**models))


def split(case):
    return msgspec.structs.replace(case, models=msgspec.structs.replace(case.models, fsdp2=Fsdp2Settings()))


def test_a_kl_penalty_measures_the_way_from_version_0_and_pulls_back(case):
    loss = LossConfig(kl_penalty=KlPenalty(coef=0.5))
    found = train_case(single_rank(), msgspec.structs.replace(case, loss=loss, last_step=3))
    distances = [stats["kl_to_reference"] for stats in found.stats]
    assert 0 < distances[0] < distances[-1]
    free = train_case(single_rank(), msgspec.structs.replace(case, last_step=3))
    start = load_file(Path(case.folder) / "policy" / "model.safetensors")
    way = [sum(float(np.square(one.weights[k] - start[k]).sum()) for k in start) for one in (found, free)]
    assert way[0] < way[1]


def test_a_teacher_draws_the_policy_to_itself(tmp_path, case):
    loss = LossConfig(distillation=Distillation(coef=1.0, rl_weight=0.0))
    taught = with_models(msgspec.structs.replace(case, loss=loss, last_step=6), teacher_folder=other_model(tmp_path))
    gaps = []
    backend, _ = open_backend(taught)
    for number in range(1, 7):
        manifest, rows = step_of(1, mini_batches=1)
        gaps.append(backend.train(msgspec.structs.replace(manifest, step=number), rows).stats["teacher_gap"])
    assert gaps[-1] < gaps[0]


def test_a_critic_learns_the_returns_and_its_steps_move_the_policy(case):
    backend, _ = open_backend(with_models(case, critic=CRITIC))
    found = []
    for number in range(1, 9):
        manifest, rows = step_of(1, mini_batches=1)
        found.append(backend.train(msgspec.structs.replace(manifest, step=number, algorithm="gae"), rows).stats)
    assert all("grad_norm" in stats and "critic_grad_norm" in stats for stats in found)
    assert found[-1]["value_error_squared"] < 0.8 * found[0]["value_error_squared"]


def test_while_the_critic_warms_up_the_policy_rests(case):
    warm = with_models(
        msgspec.structs.replace(case, algorithm="gae", last_step=2),
        critic=msgspec.structs.replace(CRITIC, warmup_steps=2),
    )
    found = train_case(single_rank(), warm)
    start = load_file(Path(case.folder) / "policy" / "model.safetensors")
    assert largest_difference([found.weights[k] for k in start], [*start.values()]) == 0
    assert "critic_loss" in found.stats[1]


@pytest.mark.parametrize("unit", ["token", "turn"])
def test_split_over_ranks_a_whole_ppo_step_gives_the_same_gradients(tmp_path, case, unit):
    advantages = msgspec.structs.replace(PPO, unit=unit)
    ppo = with_models(
        msgspec.structs.replace(case, algorithm="gae", loss=LossConfig(method=Ppo(), kl_penalty=KlPenalty(coef=0.1))),
        critic=CRITIC,
        advantages=advantages,
        reference_folder=other_model(tmp_path),
    )
    alone = train_case(single_rank(), ppo)
    together = run_ranks(2, train_case, split(ppo), store=tmp_path / "store")
    assert len(alone.gradients) == 4
    assert_same_gradients(together[0], alone)
    for name in ("critic_loss", "value_error_squared", "kl_reward", "advantage"):
        assert together[0].stats[0][name] == pytest.approx(alone.stats[0][name], abs=1e-4)


def test_kl_rewards_still_to_come_are_added_to_other_estimators_advantages(case, tmp_path):
    rule = AdvantageSettings(kl_reward=KlPenalty(coef=0.1, estimator="k1"))
    found = train_case(single_rank(), with_models(case, advantages=rule, reference_folder=other_model(tmp_path)))
    plain = train_case(single_rank(), case)
    assert found.stats[0]["kl_reward"] != 0
    assert found.stats[0]["advantage"] != pytest.approx(plain.stats[0]["advantage"], abs=1e-6)


def test_a_resumed_critic_goes_on_with_the_same_bits(case):
    ppo = with_models(msgspec.structs.replace(case, algorithm="gae", checkpoint_every=2), critic=CRITIC, advantages=PPO)
    straight = train_case(
        single_rank(), msgspec.structs.replace(ppo, last_step=4, folder=case.folder, checkpoint_every=0)
    )
    train_case(single_rank(), msgspec.structs.replace(ppo, last_step=2))
    resumed = train_case(single_rank(), msgspec.structs.replace(ppo, last_step=4))
    assert resumed.resumed == 2
    assert largest_difference([*resumed.weights.values()], [*straight.weights.values()]) == 0
    assert resumed.stats[-1]["critic_loss"] == straight.stats[-1]["critic_loss"]


def test_adapters_alone_are_trained_and_exported_merged_and_by_themselves(tmp_path, case):
    lora = LoraSettings(rank=4, alpha=8)
    backend, placement = open_backend(with_models(case, lora=lora))
    for number in (1, 2):
        backend.train(*step_of(number))
    shapes = {g.shape for g in placement.gradients[0]}
    assert all(4 in shape for shape in shapes)
    backend.save_checkpoint(2, 1)
    backend.export_weights(str(tmp_path / "out" / "v2"))
    backend.close()
    start, merged = (load_file(tmp_path / folder / "model.safetensors") for folder in ("policy", "out/v2"))
    assert start.keys() == merged.keys()
    changed = {name for name in start if not np.array_equal(start[name], merged[name])}
    assert changed == {name for name in start if "proj" in name}
    adapter = tmp_path / "out" / "v2" / "adapter"
    names = load_file(adapter / "adapter_model.safetensors").keys()
    assert all(name.startswith("base_model.model.model.layers.") for name in names)
    assert json.loads((adapter / "adapter_config.json").read_text())["r"] == 4
    from peft import PeftModel  # noqa: PLC0415 - slow to import

    base = AutoModelForCausalLM.from_pretrained(tmp_path / "policy")
    ids = torch.arange(20, 60)[None]
    with torch.no_grad():
        by_adapter = PeftModel.from_pretrained(base, adapter).eval()(ids).logits
        by_merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "v2").eval()(ids).logits
    assert torch.allclose(by_adapter, by_merged, atol=1e-4)
    again, _ = open_backend(with_models(case, lora=lora))
    assert again.resume() == 2
    assert again.digest() == backend.digest()


def test_an_adapter_is_exported_alone_under_pefts_names_where_engines_take_it(tmp_path, case):
    lora = LoraSettings(rank=4, alpha=8)
    backend, _ = open_backend(with_models(case, lora=lora))
    backend.train(*step_of(1))
    backend.export_weights(str(tmp_path / "whole"))
    backend._settings = msgspec.structs.replace(backend._settings, adapter_only=True)
    backend.export_weights(str(tmp_path / "alone"))
    backend.close()
    assert {path.name for path in (tmp_path / "alone").iterdir()} >= {
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    assert not (tmp_path / "alone" / "model.safetensors").exists()
    assert read_folder(tmp_path / "alone").file == "adapter_model.safetensors"
    base = load_torch(tmp_path / "policy" / "model.safetensors")
    found, wanted = put_on(base, tmp_path / "alone"), load_torch(tmp_path / "whole" / "model.safetensors")
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted), "engines serve the trainer's own numbers"


def test_split_adapters_with_the_base_as_reference_give_the_same_gradients(tmp_path, case):
    tuned = with_models(
        msgspec.structs.replace(case, loss=LossConfig(kl_penalty=KlPenalty(coef=0.1)), last_step=2),
        lora=LoraSettings(rank=4),
    )
    alone = train_case(single_rank(), tuned)
    together = run_ranks(2, train_case, split(tuned), store=tmp_path / "store")
    assert alone.stats[1]["kl_to_reference"] > 0
    assert_same_gradients(together[0], alone)


@pytest.mark.parametrize(
    ("loss", "models", "words"),
    [
        (LossConfig(distillation=Distillation(coef=1.0)), {}, "needs a teacher: set training.teacher"),
        (LossConfig(), {"teacher_folder": "x"}, "loss.distillation is not"),
        (LossConfig(), {"reference_folder": "x"}, "neither loss.kl_penalty nor training.kl_reward"),
        (
            LossConfig(kl_penalty=KlPenalty(coef=1.0)),
            {"reference_folder": "nowhere"},
            "reference model: expected a HF model",
        ),
        (LossConfig(), {"lora": LoraSettings(targets=("nothing",))}, "training.lora.targets"),
        (LossConfig(), {"critic": CriticSettings(folder="nowhere")}, "critic model: expected a HF model"),
    ],
)
def test_what_is_missing_or_of_no_use_is_refused_by_name(case, loss, models, words):
    with pytest.raises(TrainingError, match=words):
        open_backend(with_models(case, **models), loss=loss)


def test_a_critic_and_the_estimator_must_go_together(case):
    with pytest.raises(TrainingError, match="estimator grpo and the trainer has a critic"):
        train_case(single_rank(), with_models(case, critic=CRITIC))
    with pytest.raises(TrainingError, match="estimator gae and the trainer has no critic"):
        train_case(single_rank(), msgspec.structs.replace(case, algorithm="gae"))
