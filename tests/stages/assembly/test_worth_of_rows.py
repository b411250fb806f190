"""What rows are worth: turn rewards, shaped rewards, penalties, and the figures told of them."""

import pytest
from assembly_log import (
    REINFORCE,
    advantages,
    fold_all,
    issued,
    manifests,
    outputs_of,
    row,
    settings,
    trajectory,
    whole_group,
)

from stages.assembly.advantages import Estimator, EstimatorSettings
from stages.assembly.fold import AssemblyFold
from stages.assembly.rewards import LengthPenalty, Overlong


def test_turn_rewards_give_each_turn_its_own_advantage():
    rows = [row(0, 0, reward=1.0, turn_rewards=[1.0, 0.25])]
    messages = [issued(0, slots=2), trajectory(0, 0, 1.0, rows=rows), trajectory(0, 1, 0.0)]
    (manifest,) = manifests(outputs_of(messages, estimator=EstimatorSettings(name=Estimator.DR_GRPO)))
    assert advantages(manifest) == [0.5, -0.5]
    assert manifest.turn_advantages == [[0.5, -0.25], []]


def test_gae_gets_the_shaped_reward_as_it_is():
    estimator = EstimatorSettings(name=Estimator.GAE)
    (manifest,) = manifests(
        outputs_of(whole_group(0, [3.0, 0.5]), estimator=estimator, reward_bias=-1.0, reward_scale=2.0, reward_clip=2.5)
    )
    assert advantages(manifest) == [2.5, -1.0]
    assert manifest.reward.as_numpy().tolist() == [3.0, 0.5]


def test_penalties_for_length_come_before_bias_scale_and_clip():
    members = [trajectory(0, 0, 1.0, num_loss_tokens=9), trajectory(0, 1, 1.0, num_loss_tokens=6)]
    outputs = outputs_of(
        [issued(0, slots=2), *members],
        overlong=Overlong(max_tokens=10, buffer_tokens=4, factor=1.0),
        estimator=REINFORCE,
    )
    assert advantages(manifests(outputs)[0]) == [0.25, 1.0]
    outputs = outputs_of(
        [issued(0, slots=2), *members], length_penalty=LengthPenalty(output_tokens_weight=0.9), estimator=REINFORCE
    )
    assert advantages(manifests(outputs)[0]) == pytest.approx([0.1, 0.4])


def test_figures_are_given_per_stream():
    messages = [
        *whole_group(0, [1, 0, None]),
        *whole_group(1, [1, 1], stream="code"),
        *whole_group(2, [None, None], stream="code"),
    ]
    (manifest,) = manifests(outputs_of([*messages, *whole_group(3, [0, 1])], groups_per_step=3))
    code, both = manifest.stream_stats["code"], manifest.stats
    assert (code["groups"], code["closed_groups"], code["dropped_too_few_usable"]) == (1, 2, 1)
    assert code["pre_filter_usable_slot_yield"] == 0.5
    assert (both["groups"], both["n_groups_size_2"], both["usable_group_size"]) == (3, 3, 2)
    assert both["pre_filter_usable_slot_yield"] == 6 / 9
    assert manifest.stream_stats["math"]["target_slots"] == 5


def test_figures_of_the_latest_step_are_gauges_too():
    fold = AssemblyFold(settings())
    state, _ = fold_all(fold, whole_group(0, [1, 0], stream="code"))
    gauges = fold.describe(state)[1]
    assert (gauges["reward_mean"], gauges["code.reward_mean"], gauges["next_step"]) == (0.5, 0.5, 2)


def test_group_loss_weights_of_a_mini_batch_add_up_to_one():
    messages = [*whole_group(0, [1, 0, 1]), *whole_group(1, [1, 0])]
    (manifest,) = manifests(outputs_of(messages, groups_per_step=2))
    stats = manifest.stats
    assert stats["group_loss_weight"] == pytest.approx(0.5)
    assert (stats["group_loss_weight_size_3"], stats["group_loss_weight_size_2"]) == (
        pytest.approx(0.6),
        pytest.approx(0.4),
    )
