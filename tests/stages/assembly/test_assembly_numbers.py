"""Statistics, estimators, weights and rewards on sets small enough to check by hand."""

import itertools
import math

import pytest

from stages.assembly import moments
from stages.assembly.advantages import Estimator, EstimatorSettings, advantages, whitening
from stages.assembly.normalization import Level, Normalization, normalize
from stages.assembly.rewards import (
    Cost,
    LengthPenalty,
    Overlong,
    discounted_returns,
    length_penalties,
    overlong_penalty,
    shape,
    weighted_reward,
)
from stages.assembly.weights import Aggregation, check_aggregation, group_index, row_weights, step_weights


def estimate(groups, name, counts=None, **changes):
    counts = counts or [[1] * len(group) for group in groups]
    return advantages(groups, counts, EstimatorSettings(name=name, **changes))


def test_the_mean_of_a_constant_set_is_that_constant():
    assert moments.mean([0.1] * 3) == 0.1
    assert moments.leave_one_out_means([0.1] * 3) == [0.1] * 3


def test_sums_don_t_depend_on_order():
    values = [0.1, 1e16, -1e16, 0.3, 7.7e-5]
    means = {moments.mean(list(order)) for order in itertools.permutations(values)}
    assert len(means) == 1


@pytest.mark.parametrize("width", [1e-10, 5e-10])
def test_a_set_as_narrow_as_rounding_has_no_spread(width):
    assert not moments.has_spread([0.5, 0.5 + width])
    assert moments.has_spread([0.5, 0.5 + 2e-9])
    assert not moments.has_spread([1e6, 1e6 * (1 + width)])


@pytest.mark.parametrize("level", [Level.GROUP, Level.BATCH])
@pytest.mark.parametrize("loo", [False, True])
def test_a_set_without_spread_gives_zero_whatever_eps(level, loo):
    settings = Normalization(mean=level, std=level, leave_one_out=loo, eps=0.0)
    assert normalize([[0.1, 0.1, 0.1], [0.1]], settings) == [[0.0] * 3, [0.0]]


def test_batch_statistics_count_every_slot():
    (found,) = normalize([[1.0, 3.0]], Normalization(mean=Level.BATCH, std=Level.BATCH, ddof=0, eps=0.0))
    assert found == [-1.0, 1.0]
    found = normalize([[1.0], [3.0]], Normalization(mean=Level.BATCH, std=Level.BATCH, ddof=0, eps=0.0))
    assert found == [[-1.0], [1.0]]


def test_the_std_is_taken_around_the_mean_in_use_or_around_its_own():
    groups = [[0.0, 2.0], [4.0, 6.0]]
    in_use = Normalization(mean=Level.GROUP, std=Level.BATCH, ddof=0, eps=0.0)
    assert normalize(groups, in_use) == [[-1.0, 1.0]] * 2
    own = Normalization(mean=Level.GROUP, std=Level.BATCH, std_around_own_mean=True, ddof=0, eps=0.0)
    assert normalize(groups, own)[0] == pytest.approx([-1 / math.sqrt(5), 1 / math.sqrt(5)])


def test_the_std_of_one_is_one():
    settings = Normalization(mean=Level.NONE, std=Level.GROUP, eps=0.0)
    assert normalize([[5.0]], settings) == [[5.0]]


def test_a_group_without_live_slots_is_refused():
    with pytest.raises(ValueError, match="live slot"):
        normalize([[1.0], []], Normalization())


@pytest.mark.parametrize("name", [name for name in Estimator if name not in (Estimator.REINFORCE, Estimator.GAE)])
def test_a_group_of_one_gets_zero_and_so_does_a_group_without_spread(name):
    lone, equal, live = estimate([[0.7], [0.5, 0.5], [1.0, 0.0]], name)
    assert lone == [0.0]
    if name is not Estimator.REINFORCE_PP_BASELINE:  # whitening moves the batch's own centre
        assert equal == [0.0, 0.0]
    assert any(live)


def test_reinforce_and_gae_keep_the_value():
    for name in (Estimator.REINFORCE, Estimator.GAE):
        assert estimate([[0.7], [1.0, 0.0]], name) == [[0.7], [1.0, 0.0]]


def test_opo_weighs_the_baseline_by_length():
    assert estimate([[1.0, 0.0]], Estimator.OPO, [[30, 10]]) == [[0.25, -0.75]]


def test_pass_at_k_rewards_the_single_best_answer():
    assert estimate([[0.0, 1.0, 0.25]], Estimator.GRPO_PASSK, divide_by_std=False) == [[0.0, 0.75, 0.0]]
    assert estimate([[1.0, 1.0, 0.0]], Estimator.GRPO_PASSK, divide_by_std=False) == [[0.0, 0.0, 0.0]]


def test_max_rl_divides_by_the_success_rate():
    assert estimate([[1.0, 0.0, 0.0, 0.0]], Estimator.MAX_RL, eps=0.0) == [[3.0, -1.0, -1.0, -1.0]]
    assert estimate([[-1.0, 0.0]], Estimator.MAX_RL) == [[0.0, 0.0]]


def test_whitening_counts_tokens():
    line = whitening([0.0, 1.0], [1, 3])
    values = [line.at(0.0)] + [line.at(1.0)] * 3
    assert sum(values) == pytest.approx(0.0, abs=1e-12)
    assert sum(value * value for value in values) / 3 == pytest.approx(1.0, abs=1e-6)


def test_no_advantage_is_a_negative_zero():
    for group in estimate([[1.0, 1.0], [2.0, 0.0, 1.0]], Estimator.DR_GRPO):
        assert all(math.copysign(1.0, value) > 0 for value in group if value == 0.0)


def test_a_reward_is_moved_scaled_and_clipped_in_that_order():
    assert shape(3.0, bias=-1.0, scale=2.0, clip=3.5) == 3.5
    assert shape(-9.0, bias=-1.0, scale=2.0, clip=3.5) == -3.5
    assert shape(0.5) == 0.5


def test_the_overlong_penalty_starts_in_the_buffer_and_grows_beyond_the_limit():
    rule = Overlong(max_tokens=10, buffer_tokens=4, factor=2.0)
    assert [overlong_penalty(length, rule) for length in (2, 6, 8, 10, 12)] == [0.0, 0.0, -1.0, -2.0, -3.0]


def test_the_most_costly_slot_loses_the_full_share():
    costs = [Cost(num_output_tokens=out, num_input_tokens=0, num_turns=1) for out in (10, 20)]
    assert length_penalties([1.0, 0.0], costs, LengthPenalty(output_tokens_weight=0.4)) == [-0.1, -0.2]


def test_turn_rewards_flow_back_discounted():
    assert discounted_returns([1.0, 0.0, 2.0], 0.5) == [1.5, 1.0, 2.0]
    assert discounted_returns([], 0.5) == []


def test_objectives_that_abstain_are_left_out():
    assert weighted_reward([1.0, None], [2.0, 5.0]) == 2.0
    assert weighted_reward([None, math.nan], [2.0, 5.0]) is None


@pytest.mark.parametrize(
    ("mode", "divisor", "right"),
    [
        (Aggregation.TOKEN_MEAN, None, [1 / 12, 1 / 12, 0, 1 / 12]),
        (Aggregation.SEQ_MEAN, None, [1 / 6, 1 / 12, 0, 1 / 18]),
        (Aggregation.PROMPT_MEAN, None, [1 / 12, 1 / 12, 0, 1 / 12]),
        (Aggregation.CONSTANT, 10.0, [1 / 30, 1 / 30, 0, 1 / 30]),
    ],
)
def test_each_mode_is_one_weight_a_row(mode, divisor, right):
    assert row_weights([2, 4, 0, 6], [0, 0, 1, 2], mode, divisor).tolist() == pytest.approx(right)


@pytest.mark.parametrize("mode", Aggregation)
def test_without_trained_tokens_all_weights_are_zero(mode):
    divisor = 8.0 if mode is Aggregation.CONSTANT else None
    assert row_weights([0, 0], [0, 1], mode, divisor).tolist() == [0.0, 0.0]
    assert row_weights([], [], mode, divisor).tolist() == []


def test_each_mini_batch_is_weighed_on_its_own():
    assert step_weights([2, 4, 6], [0, 1, 2], [0, 0, 1], Aggregation.TOKEN_MEAN).tolist() == [1 / 6, 1 / 6, 1 / 6]


@pytest.mark.parametrize("divisor", [None, 0.0, -1.0, math.inf, math.nan])
def test_the_constant_mode_needs_a_length(divisor):
    with pytest.raises(ValueError, match="divisor"):
        check_aggregation("constant", divisor)


def test_counts_and_groups_must_be_as_many():
    with pytest.raises(ValueError, match="one group per row"):
        row_weights([1, 2], [0], Aggregation.TOKEN_MEAN)
    with pytest.raises(ValueError, match="at least one row"):
        group_index([1, 0])
