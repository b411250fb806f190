"""FSDP2 beside the plain backend: the same gradients from the same ragged steps, however rows and parameters are split."""

import msgspec
import pytest
from backend_case import Case, assert_same_gradients, largest_difference, policy_folder, train_case
from rank_processes import run_ranks

from stages.learning.losses.config import LossConfig
from stages.training.backends import ModelSettings
from stages.training.fsdp2_placement import Fsdp2Settings
from stages.training.ranks import single_rank

SPLIT = ModelSettings(fsdp2=Fsdp2Settings())


def both(tmp_path, world_size, case, split=SPLIT):
    alone = train_case(single_rank(), case)
    together = run_ranks(
        world_size, train_case, msgspec.structs.replace(case, models=split), store=tmp_path / f"store-{world_size}"
    )
    return alone, together


@pytest.fixture
def case(tmp_path):
    policy_folder(tmp_path)
    return Case(folder=str(tmp_path))


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_gradients_are_those_of_the_whole_model(tmp_path, case, world_size):
    alone, together = both(tmp_path, world_size, case)
    assert_same_gradients(together[0], alone)
    assert sum(one.num_rows for one in together) == alone.num_rows
    assert largest_difference([*together[0].weights.values()], [*alone.weights.values()]) < 1e-5
    for name in ("grad_norm", "loss", "ratio", "step_loss"):
        assert together[0].stats[0][name] == pytest.approx(alone.stats[0][name], abs=1e-5)


def test_a_rank_without_rows_takes_part_with_nothing(tmp_path, case):
    few = msgspec.structs.replace(case, num_rows=2, mini_batches=1)
    alone, together = both(tmp_path, 3, few)
    assert sorted(one.num_rows for one in together) == [0, 1, 1]
    assert_same_gradients(together[0], alone)


@pytest.mark.parametrize("budget", [60, 400])
def test_other_budgets_split_rows_differently_and_change_no_gradient(tmp_path, case, budget):
    alone = train_case(single_rank(), case)
    split = msgspec.structs.replace(case, models=SPLIT, budget=budget, last_step=1)
    together = run_ranks(2, train_case, split, store=tmp_path / "store")
    assert_same_gradients(together[0], alone)


def test_recomputed_proximal_logprobs_activation_checkpointing_and_host_memory_change_no_gradient(tmp_path, case):
    decoupled = msgspec.structs.replace(case, loss=LossConfig(proximal="recompute", behaviour_weight="token"))
    split = ModelSettings(
        activation_checkpointing=True, fsdp2=Fsdp2Settings(cpu_offload=True, reshard_after_forward=False)
    )
    alone, together = both(tmp_path, 2, decoupled, split)
    assert_same_gradients(together[0], alone)


def test_bf16_in_forward_and_backward_stays_near_float32(tmp_path, case):
    split = ModelSettings(fsdp2=Fsdp2Settings(compute_dtype="bfloat16"))
    alone, together = both(tmp_path, 2, case, split)
    assert together[0].stats[0]["grad_norm"] == pytest.approx(alone.stats[0]["grad_norm"], rel=0.05)
    assert together[0].skipped == ""
