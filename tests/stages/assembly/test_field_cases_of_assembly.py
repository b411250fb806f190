"""Reported faults of the field in grouping, rewards, normalisation, packing, redistribution, loss and staleness: never here."""

import math
import random
from itertools import chain

import msgspec
import pytest
import torch
from assembly_log import (
    advantages,
    closed,
    fold_all,
    issued,
    manifests,
    row,
    settings,
    steps,
    tick,
    trajectory,
    whole_group,
)

from pipeline.errors import ContractError
from stages.assembly.advantages import Estimator, EstimatorSettings
from stages.assembly.fold import AssemblyFold
from stages.assembly.normalization import Level, Normalization, normalize
from stages.learning.draw import logprobs_at
from stages.sampling.credit import available

CENTRED = EstimatorSettings(name=Estimator.DR_GRPO)
POPULATION = EstimatorSettings(name=Estimator.GRPO, ddof=0, eps=0.0)
SAMPLE = EstimatorSettings(name=Estimator.GRPO, ddof=1, eps=0.0)


def advantages_of(messages, groups: int, estimator: EstimatorSettings, **changes) -> dict[str, float]:
    """row id → advantage after folding these messages into one step."""
    fold = AssemblyFold(settings(groups_per_step=groups, estimator=estimator, **changes))
    (manifest,) = manifests(fold_all(fold, messages)[1])
    return dict(zip(manifest.row_ids, advantages(manifest), strict=True))


def of_group(rewards, estimator: EstimatorSettings) -> list[float]:
    return list(advantages_of(whole_group(0, rewards), 1, estimator).values())


# Trl 5902: abstaining is no reward


def test_trl_5902_a_row_without_a_reward_neither_votes_nor_trains():
    a = [1, None, 0, 1]
    assert of_group(a, CENTRED) == pytest.approx([0.333333, -0.666667, 0.333333], abs=1e-6)
    assert of_group(a, POPULATION) == pytest.approx([0.707107, -1.414214, 0.707107], abs=1e-6)
    assert of_group(a, SAMPLE) == pytest.approx([0.57735, -1.154701, 0.57735], abs=1e-6)


def test_trl_5902_equal_rewards_of_the_scored_rows_give_zero():
    for estimator in (CENTRED, POPULATION, SAMPLE):
        assert of_group([-1, -1, None, None], estimator) == [0.0, 0.0]


def test_trl_5902_the_only_scored_row_gets_zero_and_no_nan():
    normal = Normalization(mean=Level.GROUP, std=Level.GROUP)
    assert normalize([[0.7]], normal) == [[0.0]]
    # By default such a group is not even trained: it has no baseline.
    lone = whole_group(0, [None, None, None, 0.7, None, None, None, None])
    _, outputs = fold_all(AssemblyFold(settings()), lone)
    assert [(one.usable, one.reason) for one in closed(outputs)] == [(False, "too_few_usable")]


def test_trl_5902_a_group_without_any_reward_is_dropped_and_counted():
    state, outputs = fold_all(AssemblyFold(settings()), whole_group(0, [None] * 4))
    assert not closed(outputs)[0].usable
    assert state.num_groups_dropped == 1
    assert not steps(outputs)


def test_trl_5902_an_episode_that_was_never_scored_is_rejected_not_zero():
    messages = [issued(0, slots=3), trajectory(0, 0, 1.0), trajectory(0, 1, 0.0)]
    never = trajectory(0, 2, None, rows=[row(0, 2)])
    found = advantages_of([*messages, never], 1, CENTRED)
    assert list(found.values()) == [0.5, -0.5]


# Slime 2300: one vote a slot


def _slime_2300_messages():
    three = trajectory(0, 0, 1.0, rows=[row(0, 0, index, reward=1.0) for index in range(3)])
    return [issued(0, slots=2), three, trajectory(0, 1, 0.0)]


def test_slime_2300_a_slot_of_three_rows_counts_once():
    for estimator, right in ((CENTRED, 0.5), (POPULATION, 1.0), (SAMPLE, 0.707107)):
        found = list(advantages_of(_slime_2300_messages(), 1, estimator).values())
        assert found == pytest.approx([right, right, right, -right], abs=1e-6)


def test_slime_2300_different_rewards_inside_a_slot_need_rewards_per_completion():
    rows = [row(0, 0, 0, reward=1.0), row(0, 0, 1, reward=0.0)]
    with pytest.raises(ContractError, match="different rewards"):
        fold_all(AssemblyFold(settings()), [issued(0), trajectory(0, 0, 1.0, rows=rows)])


def test_slime_2300_a_discounted_score_may_differ_by_row_when_it_is_mapped_to_completions():
    rows = [row(0, 0, 0, reward=0.5), row(0, 0, 1, reward=1.0)]
    mapped = msgspec.structs.replace(trajectory(0, 0, 1.0, rows=rows), rewards_per_completion=True)
    messages = [issued(0, slots=2), mapped, trajectory(0, 1, 0.0)]
    assert list(advantages_of(messages, 1, CENTRED).values()) == [0.0, 0.5, -0.5]


def test_slime_2300_rewards_per_completion_are_used_row_by_row():
    rows = [
        row(0, 0, 0, reward=1.0, turn_rewards=[1.0]),
        row(0, 0, 1, reward=0.0, turn_rewards=[0.0]),
    ]
    messages = [issued(0, slots=2), trajectory(0, 0, 1.0, rows=rows), trajectory(0, 1, 0.0)]
    assert list(advantages_of(messages, 1, CENTRED).values()) == [0.5, -0.5, -0.5]


# Slime 1414: groups by id not by position

SLIME_1414_REWARDS = ((1, 2, 3, 4), (5, 5, 5), (9, 10, 11, 12))
SLIME_1414_RIGHT = {
    "centred": (CENTRED, [-1.5, -0.5, 0.5, 1.5, 0, 0, 0, -1.5, -0.5, 0.5, 1.5]),
    "population": (
        POPULATION,
        [-1.341641, -0.447214, 0.447214, 1.341641, 0, 0, 0, -1.341641, -0.447214, 0.447214, 1.341641],
    ),
    "sample": (
        SAMPLE,
        [-1.161895, -0.387298, 0.387298, 1.161895, 0, 0, 0, -1.161895, -0.387298, 0.387298, 1.161895],
    ),
}


@pytest.mark.parametrize("kind", SLIME_1414_RIGHT)
@pytest.mark.parametrize("seed", [None, 1, 2, 3])
def test_slime_1414_groups_of_different_sizes_in_any_order(kind, seed):
    estimator, right = SLIME_1414_RIGHT[kind]
    groups = [whole_group(ordinal, rewards) for ordinal, rewards in enumerate(SLIME_1414_REWARDS)]
    members = [message for group in groups for message in group[1:]]
    if seed is not None:
        random.Random(seed).shuffle(members)
    found = advantages_of([*(group[0] for group in groups), *members], 3, estimator)
    assert list(found.values()) == pytest.approx(right, abs=1e-6)


def test_slime_1414_interleaved_groups_don_t_mix():
    a, b = whole_group(0, [1, 1]), whole_group(1, [0, 0])
    mixed = [a[0], b[0], a[1], b[1], a[2], b[2]]
    assert list(advantages_of(mixed, 2, CENTRED).values()) == [0, 0, 0, 0]


# Rllm 605: the group is the prompt


def test_rllm_605_siblings_of_different_agents_share_a_baseline():
    messages = whole_group(0, [1, 0, 1, 0])
    for estimator, right in ((CENTRED, 0.5), (POPULATION, 1.0), (SAMPLE, 0.866025)):
        assert list(advantages_of(messages, 1, estimator).values()) == pytest.approx([right, -right] * 2, abs=1e-6)


def test_rllm_605_a_step_of_lone_members_only_stops_with_an_error():
    lone = [message for ordinal in range(2) for message in whole_group(ordinal, [1.0, None, None, None])]
    fold = AssemblyFold(settings(groups_per_step=2, estimator=EstimatorSettings(name=Estimator.REINFORCE)))
    with pytest.raises(ContractError, match="a group of its own"):
        fold_all(fold, lone)


# NemoRl 2700: a group that never completes


def _nemo_rl_2700_messages():
    return [
        issued(0, deadline=5),
        *(trajectory(0, slot, reward) for slot, reward in enumerate([1, 0, 1])),
        tick(4),
        tick(5),
    ]


def test_nemo_rl_2700_it_closes_at_its_deadline_with_the_members_it_has():
    _, outputs = fold_all(AssemblyFold(settings()), _nemo_rl_2700_messages())
    assert [(one.num_usable, one.num_missing) for one in closed(outputs)] == [(3, 1)]


@pytest.mark.parametrize(
    ("estimator", "right"),
    [(CENTRED, [0.333333, -0.666667]), (POPULATION, [0.707107, -1.414214]), (SAMPLE, [0.57735, -1.154701])],
)
def test_nemo_rl_2700_its_statistics_use_the_members_that_exist(estimator, right):
    found = list(advantages_of(_nemo_rl_2700_messages(), 1, estimator).values())
    assert found == pytest.approx([right[0], right[1], right[0]], abs=1e-6)


def test_nemo_rl_2700_too_small_for_the_minimum_it_is_dropped_and_counted():
    state, outputs = fold_all(AssemblyFold(settings(min_usable_group_size=4)), _nemo_rl_2700_messages())
    assert closed(outputs)[0].reason == "too_few_usable"
    assert state.num_groups_dropped == 1


def test_nemo_rl_2700_the_missing_sibling_is_named_while_it_is_waited_for():
    fold = AssemblyFold(settings())
    state, _ = fold_all(fold, _nemo_rl_2700_messages()[:-1])
    assert "g0000000 misses slot 3 (1 of 4) since tick 0, until tick 5" in fold.describe(state)[0]


def test_nemo_rl_2700_a_late_sibling_is_ignored_and_counted():
    state, outputs = fold_all(AssemblyFold(settings()), [*_nemo_rl_2700_messages(), trajectory(0, 3, 1.0)])
    assert state.num_late == 1
    assert len(closed(outputs)) == 1


# NemoRl 4158: spread is decided by the rewards

NEMO_RL_4158_LOO = Normalization(
    mean=Level.GROUP, std=Level.GROUP, leave_one_out=True, leave_one_out_std=True, ddof=1, eps=0.0
)


def test_nemo_rl_4158_where_the_others_have_no_spread_the_difference_is_kept():
    (found,) = normalize([[0.0] + [0.95] * 7], NEMO_RL_4158_LOO)
    assert found[0] == pytest.approx(-0.95, abs=1e-9)
    assert found[1:] == pytest.approx([0.377964] * 7, abs=1e-5)


def test_nemo_rl_4158_group_scores_of_the_odd_one_out():
    rewards = [0.0] + [0.95] * 7
    assert of_group(rewards, POPULATION) == pytest.approx([-2.645751] + [0.377964] * 7, abs=1e-5)
    assert of_group(rewards, SAMPLE) == pytest.approx([-2.474874] + [0.353553] * 7, abs=1e-5)


def test_nemo_rl_4158_one_loser_among_winners():
    (found,) = normalize([[1, 1, 1, 0]], NEMO_RL_4158_LOO)
    assert found == pytest.approx([0.57735, 0.57735, 0.57735, -1.0], abs=1e-5)


# Areal 1419: partial groups keep their sizes

AREAL_1419_REWARDS = [[1, 0, 1], [1, 0], [0, 0, 1]]


def test_areal_1419_population_and_sample():
    eps = 1e-5
    right = [0.707107, -1.414214, 0.707107, 1, -1, -0.707107, -0.707107, 1.414214]
    found = normalize(AREAL_1419_REWARDS, Normalization(mean=Level.GROUP, std=Level.GROUP, ddof=0, eps=eps))
    assert list(chain(*found)) == pytest.approx(right, abs=1e-4)
    right = [0.57735, -1.154701, 0.57735, 0.707107, -0.707107, -0.57735, -0.57735, 1.154701]
    found = normalize(AREAL_1419_REWARDS, Normalization(mean=Level.GROUP, std=Level.GROUP, ddof=1, eps=eps))
    assert list(chain(*found)) == pytest.approx(right, abs=1e-4)


def test_areal_1419_the_tail_is_never_divided_by_eps():
    found = normalize([[1, 2], [3]], Normalization(mean=Level.GROUP, std=Level.GROUP, ddof=0, eps=1e-5))
    assert list(chain(*found)) == pytest.approx([-1, 1, 0], abs=1e-4)


# PrimeRl 1525: positions follow rows


def test_trl_4159_log_probs_at_the_sampling_temperature_give_ratio_one():
    logits = torch.tensor([2.0, 1.0, 0.0], dtype=torch.float64)
    at_sampling = logprobs_at(logits, 0.6)[0].item()
    assert at_sampling == pytest.approx(-0.202573, abs=1e-5)
    assert math.exp(at_sampling - logprobs_at(logits, 0.6)[0].item()) == 1.0


def test_trl_4159_the_manifest_carries_the_temperature_that_rows_were_sampled_at():
    fold = AssemblyFold(settings(temperature=0.6))
    (manifest,) = manifests(fold_all(fold, whole_group(0, [1, 0], temperature=0.6))[1])
    assert manifest.temperature == 0.6


def test_trl_4159_rows_of_another_temperature_stop_the_run():
    with pytest.raises(ContractError, match=r"temperature 1.*0\.6"):
        fold_all(AssemblyFold(settings(temperature=0.6)), whole_group(0, [1, 0], temperature=1.0))


# Areal 1345: credit has no lifetime counter


@pytest.mark.parametrize(("running", "right"), [(0, 96), (20, 76)])
def test_areal_1345_capacity_after_a_resume_is_what_it_always_was(running, right):
    credit = available(running=running, waiting=0, groups_per_step=32, max_staleness=2, max_concurrent=1000)
    assert credit.groups == right


# Verl 7568: staleness is in policy versions


def _verl_7568_messages():
    """Six steps of fresh groups, then one whose tokens were sampled by versions 4 to 5."""
    fresh = [m for step in range(6) for m in whole_group(step, [1, 0], min_version=step, max_version=step)]
    return fresh + whole_group(6, [1, 0], min_version=4, max_version=5)


def test_verl_7568_a_row_keeps_both_versions_and_the_step_its_staleness():
    _, outputs = fold_all(AssemblyFold(settings()), _verl_7568_messages())
    manifest = manifests(outputs)[-1]
    assert manifest.step == 7  # trains version 6
    assert (manifest.min_version.as_numpy().tolist(), manifest.max_version.as_numpy().tolist()) == ([4, 4], [5, 5])
    assert manifest.stats["staleness_max"] == 2.0
    assert steps(outputs)[-1].min_version == 4


def test_verl_7568_too_old_for_the_limit_it_is_dropped_with_that_reason():
    _, outputs = fold_all(AssemblyFold(settings(max_staleness=1)), _verl_7568_messages())
    assert closed(outputs)[-1].reason == "stale"
    assert len(steps(outputs)) == 6
