"""The plain torch backend: exact repetition and resume, packing that changes nothing, log-probs that equal the engine's."""

import json
import math
import shutil
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from training_case import backend, step_of
from transformers import AutoModelForCausalLM

from schemas import arrays
from stages.learning.attention import pack_layout
from stages.learning.losses.config import LossConfig
from stages.learning.qwen3 import fuse, shape_from_config
from stages.learning.sampler import Sampler, SampleRequest
from stages.learning.update import OptimizerSettings, learning_rate
from stages.training.batches import micro_batch
from stages.training.errors import CheckpointError, TrainingError
from stages.training.passes import outputs
from stages.training.ports import RowArrays
from stages.training.ranks import single_rank


@pytest.fixture(autouse=True)
def _repeatable():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(before)


def weights(trainer) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in trainer._policy.tensors().items()}


def train(trainer, first: int, last: int, **step) -> list[str]:
    return [trainer.train(*step_of(number, **step)).digest for number in range(first, last + 1)]


def test_a_step_repeats_bit_for_bit_and_moves_the_weights(tmp_path):
    digests = [train(backend(tmp_path, single_rank()), 1, 3) for _ in range(2)]
    assert digests[0] == digests[1]
    assert len(set(digests[0])) == 3


def test_packing_changes_nothing_but_rounding(tmp_path):
    found = []
    for budget in (1, 90, 10_000):
        trainer = backend(tmp_path, single_rank(), budget=budget)
        train(trainer, 1, 2)
        found.append(weights(trainer))
    for other in found[1:]:
        assert all(torch.allclose(found[0][name], other[name], atol=1e-5) for name in other)


def test_a_resumed_run_ends_with_the_same_bits(tmp_path):
    straight = train(backend(tmp_path, single_rank()), 1, 5)
    first = backend(tmp_path, single_rank())
    train(first, 1, 2)
    first.save_checkpoint(2, 1)
    second = backend(tmp_path, single_rank())
    assert second.resume() == 2
    assert second.digest() == straight[1]
    assert train(second, 3, 5) == straight[2:]


def test_a_damaged_checkpoint_is_passed_over_and_the_one_before_it_is_used(tmp_path):
    trainer = backend(tmp_path, single_rank())
    for number in (1, 2):
        train(trainer, number, number)
        trainer.save_checkpoint(number, 1)
    damaged = next((tmp_path / "checkpoints" / "step-0000002-g1").glob("*.distcp"))
    data = bytearray(damaged.read_bytes())
    data[len(data) // 2] ^= 1
    damaged.write_bytes(data)
    assert backend(tmp_path, single_rank()).resume() == 1
    shutil.rmtree(tmp_path / "checkpoints" / "step-0000001-g1")
    assert backend(tmp_path, single_rank()).resume() == 0


def test_checkpoints_are_kept_by_number_and_a_part_is_never_looked_at(tmp_path):
    trainer = backend(tmp_path, single_rank(), keep_checkpoints=2)
    (tmp_path / "checkpoints" / ".part-step-0000009-g1").mkdir(parents=True)
    for number in range(1, 5):
        train(trainer, number, number)
        trainer.save_checkpoint(number, 1)
    trainer = backend(tmp_path, single_rank(), keep_checkpoints=2)
    assert trainer.resume() == 4
    trainer.save_checkpoint(4, 2)
    assert trainer.checkpoint_steps() == [3, 4]
    assert sorted(p.name for p in (tmp_path / "checkpoints").glob("step-*")) == ["step-0000003-g1", "step-0000004-g2"]


def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    trainer = backend(tmp_path, single_rank())
    train(trainer, 1, 1)
    trainer.save_checkpoint(1, 1)
    record = tmp_path / "checkpoints" / "step-0000001-g1" / "checkpoint.json"
    record.write_text(json.dumps({**json.loads(record.read_text()), "settings_hash": "0" * 16}))
    with pytest.raises(CheckpointError, match="other model or optimizer"):
        backend(tmp_path, single_rank()).resume()


def test_steps_out_of_order_are_refused(tmp_path):
    with pytest.raises(TrainingError, match="expected step 1 next, found 2"):
        backend(tmp_path, single_rank()).train(*step_of(2))


@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.6])
def test_the_engines_logprobs_equal_the_trainers_at_the_same_weights(tmp_path, temperature):
    trainer = backend(tmp_path, single_rank())
    train(trainer, 1, 2)
    trainer.export_weights(str(tmp_path / "v2"))
    shape = shape_from_config(json.loads((tmp_path / "v2" / "config.json").read_text()))
    sampler = Sampler(fuse(shape, load_file(tmp_path / "v2" / "model.safetensors")), num_slots=8, version=2)
    manifest, _ = step_of(3, num_rows=8, mini_batches=1, temperature=temperature)
    prompts = {str(i): np.arange(5 + 9 * i, 15 + 14 * i, dtype=np.int32) for i in range(8)}
    for i, (name, prompt) in enumerate(prompts.items()):
        sampler.add(
            SampleRequest(request_id=name, prompt_ids=prompt, max_new_tokens=9 + i, temperature=temperature, seed=i)
        )
    sampled: dict[str, list] = {name: [] for name in prompts}
    while sampler.num_running:
        for token in sampler.step():
            sampled[token.request_id].append(token)
    rows = {}
    for i, (name, prompt) in enumerate(prompts.items()):
        mask = np.arange(len(prompt) + 9 + i) >= len(prompt)
        rows[i] = RowArrays(
            token_ids=np.concatenate([prompt, [t.token_id for t in sampled[name]]]).astype(np.int32),
            loss_mask=mask,
            logprobs=np.concatenate([np.zeros(len(prompt)), [t.logprob for t in sampled[name]]]).astype(np.float32),
            versions=np.where(mask, 2, -1).astype(np.int32),
            turns=np.where(mask, 0, -1).astype(np.int32),
        )
    sizes = manifest.num_tokens.as_numpy()
    manifest = msgspec.structs.replace(manifest, num_tokens=arrays.int32([len(r.token_ids) for r in rows.values()]))
    assert len(sizes) == len(rows)
    stats = trainer.train(manifest, rows).stats
    assert 0 < stats["mismatch/max"] < 1e-4
    assert stats["mismatch/kl"] < 1e-8


def test_a_pack_gives_each_row_what_transformers_gives_it_alone(tmp_path):
    trainer = backend(tmp_path, single_rank())
    reference = AutoModelForCausalLM.from_pretrained(tmp_path / "policy").eval()
    manifest, rows = step_of(1, temperature=0.8, longest=120)
    batch = micro_batch(manifest, rows, range(len(rows)), torch.device("cpu"))
    assert len(batch.layout.buckets) > 1
    with torch.no_grad():
        found = outputs(trainer._policy.network, batch, 0.8)[0]
        offset = 0
        for row in rows.values():
            ids = torch.from_numpy(row.token_ids).long()
            logp = (reference(ids[None]).logits[0] / 0.8).log_softmax(-1)
            for t in np.flatnonzero(row.loss_mask):
                assert abs(float(found[offset + t]) - float(logp[t - 1, ids[t]])) < 1e-5
            offset += len(ids)


def test_turn_advantages_go_to_the_tokens_of_their_turn():
    manifest, rows = step_of(1, num_rows=2, longest=60)
    turns = [sorted({int(t) for t in row.turns if t >= 0}) for row in rows.values()]
    per_turn = [[10.0 * i + t for t in row] for i, row in enumerate(turns)]
    manifest = msgspec.structs.replace(manifest, turn_advantages=per_turn)
    batch = micro_batch(manifest, rows, [0, 1], torch.device("cpu"))
    expected = np.concatenate(
        [np.where(row.turns >= 0, 10.0 * i + row.turns, 0.0) for i, row in enumerate(rows.values())]
    )
    assert batch.loss.advantages_T.tolist() == expected.tolist()
    with pytest.raises(TrainingError, match="turn advantages"):
        micro_batch(msgspec.structs.replace(manifest, turn_advantages=[[1.0] * 9, []]), rows, [0], torch.device("cpu"))


def test_a_non_finite_gradient_leaves_its_update_out_and_says_so(tmp_path):
    trainer = backend(tmp_path, single_rank())
    before = weights(trainer)
    manifest, rows = step_of(1, mini_batches=1)
    poisoned = msgspec.structs.replace(rows[3], logprobs=np.where(rows[3].loss_mask, -1e30, 0).astype(np.float32))
    result = trainer.train(manifest, {**rows, 3: poisoned})
    assert result.skipped == "non-finite gradient in mini-batch 0"
    assert all(torch.equal(before[name], after) for name, after in weights(trainer).items())
    assert train(trainer, 2, 2)


def test_rows_that_do_not_fit_the_manifest_are_named():
    manifest, rows = step_of(1)
    short = msgspec.structs.replace(rows[1], token_ids=rows[1].token_ids[:-1])
    with pytest.raises(TrainingError, match="row1"):
        micro_batch(manifest, {**rows, 1: short}, [0, 1], torch.device("cpu"))
    with pytest.raises(TrainingError, match="not fetched"):
        micro_batch(manifest, {}, [0], torch.device("cpu"))


def test_a_recomputed_proximal_policy_is_the_policy_before_the_step(tmp_path):
    trainer = backend(tmp_path, single_rank(), loss=LossConfig(proximal="recompute", behaviour_weight="token"))
    stats = trainer.train(*step_of(1, mini_batches=1)).stats
    assert stats["ratio"] == pytest.approx(1.0, abs=1e-6)
    stats = trainer.train(*step_of(2, mini_batches=4)).stats
    assert abs(stats["ratio"] - 1.0) > 1e-6


def test_exported_weights_load_in_transformers_and_appear_whole(tmp_path):
    trainer = backend(tmp_path, single_rank())
    train(trainer, 1, 1)
    for _ in range(2):
        trainer.export_weights(str(tmp_path / "out" / "v1"))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "v1")
    state = model.state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in weights(trainer).items())
    assert [path.name for path in Path(tmp_path / "out").iterdir()] == ["v1"]
    assert (tmp_path / "out" / "v1" / "chat_template.jinja").exists()


def test_the_layout_of_a_pack_bounds_its_padding():
    lengths = [3, 200, 5, 90, 100, 7, 198]
    layout = pack_layout(lengths, torch.device("cpu"))
    padded = sum(bucket.num_rows * bucket.width for bucket in layout.buckets)
    assert padded < 1.25 * sum(lengths) + 16 * len(lengths)
    assert layout.position_ids_1T[0].tolist() == [t for n in lengths for t in range(n)]


def test_schedules_rise_and_fall_as_told():
    cosine = OptimizerSettings(lr=1.0, schedule="cosine", warmup_updates=2, total_updates=6, min_lr_ratio=0.1)
    rates = [learning_rate(cosine, update) for update in range(8)]
    assert rates[:3] == [0.5, 1.0, 1.0]
    assert rates[4] == pytest.approx(0.55)
    assert rates[6] == rates[7] == pytest.approx(0.1)
    linear = OptimizerSettings(lr=1.0, schedule="linear", total_updates=4)
    assert [learning_rate(linear, update) for update in (0, 2, 9)] == [1.0, 0.5, 0.0]
    with pytest.raises(ValueError, match="total_updates"):
        OptimizerSettings(schedule="cosine")
    assert not math.isnan(rates[-1])


@pytest.mark.parametrize(
    ("first", "then", "fits"),
    [
        ({"optimizer": OptimizerSettings(weight_decay=0.1)}, {"optimizer": OptimizerSettings()}, False),
        ({"optimizer": OptimizerSettings()}, {"optimizer": OptimizerSettings(betas=(0.9, 0.999))}, False),
        ({"optimizer": OptimizerSettings(lr=1e-3)}, {"optimizer": OptimizerSettings(lr=1e-4, max_grad_norm=0.5)}, True),
    ],
)
def test_settings_that_come_back_with_a_checkpoint_must_be_those_of_the_config(tmp_path, first, then, fits):
    trainer = backend(tmp_path, single_rank(), **first)
    train(trainer, 1, 1)
    trainer.save_checkpoint(1, 1)
    if fits:
        assert backend(tmp_path, single_rank(), **then).resume() == 1
        return
    with pytest.raises(CheckpointError, match="other model or optimizer settings"):
        backend(tmp_path, single_rank(), **then).resume()
