"""Settings that can't work are refused before anything starts, with their keys and what they hold."""

import pytest
from assembly_log import REINFORCE, settings

from schemas.errors import ConfigError
from stages.assembly.advantages import EstimatorSettings
from stages.assembly.fold import AssemblyFold
from stages.assembly.normalization import Level, Normalization
from stages.assembly.rewards import Overlong
from stages.assembly.settings import check_settings, least_groups, usable_minimum
from stages.assembly.weights import Aggregation


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"groups_per_step": 0}, "groups_per_step"),
        ({"slots_per_group": 0}, "slots_per_group"),
        ({"groups_per_step": 8, "mini_batch_groups": 3}, r"mini_batch_groups = 3.*groups_per_step = 8"),
        ({"mini_batch_groups": 0}, "mini_batch_groups"),
        ({"min_usable_group_size": 0, "estimator": REINFORCE}, "at least 1, found 0"),
        ({"min_usable_group_size": 5}, "slots_per_group = 4"),
        ({"min_usable_group_size": 1}, "no baseline"),
        (
            {
                "min_usable_group_size": 1,
                "estimator": REINFORCE,
                "reward_normalization": Normalization(std=Level.GROUP),
            },
            "no baseline",
        ),
        ({"min_shares": {"code": 0.0}}, r"min_shares\.code"),
        ({"groups_per_step": 4, "min_shares": {"code": 0.6, "math": 0.7}}, "5 groups a step"),
        ({"min_shares": {"code": 0.5}, "dynamic_batch": True}, "exclude each other"),
        ({"min_accuracy": 1.2}, "min_accuracy"),
        ({"min_accuracy": 0.9, "max_accuracy": 0.1}, "every group would be dropped"),
        ({"max_staleness": -1}, "max_staleness"),
        ({"reward_clip": 0.0}, "reward_clip"),
        ({"overlong": Overlong(max_tokens=4, buffer_tokens=5)}, "buffer_tokens"),
        ({"estimator": EstimatorSettings(ddof=2)}, "ddof"),
        ({"estimator": EstimatorSettings(eps=-1.0)}, "eps"),
        ({"reward_normalization": Normalization(leave_one_out_std=True)}, "leave_one_out_std"),
        ({"aggregation": Aggregation.CONSTANT}, "finite divisor > 0"),
        ({"aggregation_divisor": 4.0}, "takes no divisor"),
    ],
)
def test_a_setting_that_can_t_work_is_refused(changes, text):
    with pytest.raises(ConfigError, match=text):
        check_settings(settings(**changes))


def test_the_minimum_is_two_with_statistics_within_groups_else_one():
    assert usable_minimum(settings(), 4) == 2
    assert usable_minimum(settings(), 1) == 1
    assert usable_minimum(settings(estimator=REINFORCE), 4) == 1
    assert usable_minimum(settings(min_usable_group_size=3), 4) == 3


def test_groups_of_one_slot_may_have_a_minimum_of_one():
    check_settings(settings(slots_per_group=1, min_usable_group_size=1))


def test_a_dynamic_batch_may_end_in_a_smaller_mini_batch():
    check_settings(settings(groups_per_step=8, mini_batch_groups=3, dynamic_batch=True))


@pytest.mark.parametrize("path", ["nowhere", "no.such.module:keep", "math:no_such_function", "math:pi"])
def test_a_filter_that_can_t_be_loaded_is_refused(path):
    with pytest.raises(ConfigError, match="user_filters"):
        AssemblyFold(settings(user_filters=(path,)))


def test_shares_are_whole_groups():
    assert least_groups(settings(groups_per_step=8, min_shares={"a": 0.01, "b": 0.3})) == {"a": 1, "b": 2}
