"""Chapter 6: how many groups may be under way.

Sampling and training run at the same time. If sampling ran ahead without a bound, the trainer would learn from a policy
that is long gone. So groups are issued on credit, and the credit follows from two counts of the log.
"""

from __future__ import annotations

import pytest

from stages.sampling.credit import available


@pytest.mark.parametrize(
    ("running", "waiting", "expected"),
    [
        (
            0,
            0,
            16,
        ),  # the beginning: two steps' worth, for the step that is trained and the one that is sampled meanwhile
        (10, 0, 6),  # running groups count,
        (10, 6, 0),  # and so do those that wait to be trained: nothing more is issued
        (3, 5, 8),  # a trained step gives the credit of its groups back
    ],
)
def test_credit_is_what_the_staleness_bound_leaves(running: int, waiting: int, expected: int) -> None:
    """`(max_staleness + 1) · groups_per_step − (running + waiting)`, in groups."""
    credit = available(running=running, waiting=waiting, groups_per_step=8, max_staleness=1, max_concurrent=64)
    assert credit.groups == expected


def test_engines_bound_it_too() -> None:
    """No more at once than the rollouts can carry; and the credit always says what binds it."""
    credit = available(running=2, waiting=0, groups_per_step=8, max_staleness=1, max_concurrent=4)
    assert (credit.groups, credit.bound_by) == (2, "max_concurrent_groups")


def test_a_bound_of_zero_is_plain_on_policy_training() -> None:
    """Sample a step, train it, load the weights, sample the next."""
    credit = available(running=0, waiting=8, groups_per_step=8, max_staleness=0, max_concurrent=64)
    assert (credit.groups, credit.bound_by) == (0, "max_staleness")
