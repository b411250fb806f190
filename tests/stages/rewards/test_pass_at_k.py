"""pass@k: its value against enumeration, its interval's properties."""

import itertools
import math
import random

from hypothesis import given
from hypothesis import strategies as st

from stages.rewards.pass_at_k import TaskCount, interval, pass_at_k, summarize, usual_ks

COUNTS = st.integers(1, 8).flatmap(
    lambda n: st.integers(0, n).map(lambda solved: TaskCount(num_rollouts=n, num_solved=solved))
)


@given(COUNTS, st.integers(1, 8))
def test_it_is_the_share_of_draws_of_k_rollouts_that_hold_a_solved_one(count, k) -> None:
    if k > count.num_rollouts:
        return
    rollouts = [number < count.num_solved for number in range(count.num_rollouts)]
    draws = list(itertools.combinations(rollouts, k))
    assert math.isclose(pass_at_k(count, k), sum(any(draw) for draw in draws) / len(draws), abs_tol=1e-12)


@given(st.lists(COUNTS, min_size=1, max_size=20))
def test_it_grows_with_k_where_every_task_has_rollouts_for_it(counts) -> None:
    least = min(count.num_rollouts for count in counts)
    values = [found.value for found in summarize(counts, range(1, least + 1))]
    assert all(first <= second + 1e-12 for first, second in itertools.pairwise(values))


@given(st.lists(st.floats(0, 1), min_size=1, max_size=50))
def test_an_interval_holds_its_mean_and_stays_between_nothing_and_one(values) -> None:
    low, high = interval(values)
    mean = math.fsum(values) / len(values)
    assert 0 <= low <= mean + 1e-12
    assert mean - 1e-12 <= high <= 1


@given(st.lists(st.sampled_from([0.0, 0.25, 1.0]), min_size=1, max_size=20), st.integers(2, 5))
def test_more_of_the_same_tasks_never_widen_it(values, times) -> None:
    low, high = interval(values)
    narrower_low, narrower_high = interval(values * times)
    assert narrower_high - narrower_low <= high - low + 1e-9


@given(COUNTS)
def test_one_task_alone_says_little(count) -> None:
    (found, *_) = summarize([count], [1])
    assert found.high - found.low > 0.3


def test_all_or_nothing_solved_still_leaves_doubt() -> None:
    none, every = interval([0.0] * 10), interval([1.0] * 10)
    assert none[0] == 0.0
    assert 0.2 < none[1] < 0.35
    assert every[1] == 1.0
    assert 0.65 < every[0] < 0.8


def test_it_covers_the_true_value_as_often_as_it_says() -> None:
    rng = random.Random(1)
    covered = 0
    for _ in range(1000):
        values = [float(rng.random() < 0.3) for _ in range(40)]
        low, high = interval(values)
        covered += low <= 0.3 <= high
    assert 0.92 <= covered / 1000 <= 0.98


def test_tasks_with_too_few_verdicts_have_no_pass_at_that_k() -> None:
    counts = [TaskCount(num_rollouts=4, num_solved=1), TaskCount(num_rollouts=1, num_solved=1)]
    one, four = summarize(counts, [1, 4])
    assert (one.value, one.num_tasks) == (0.625, 2)
    assert (four.value, four.num_tasks) == (1.0, 1)
    assert summarize([], [1]) == []


def test_the_usual_ks_are_powers_of_two_and_all_rollouts() -> None:
    assert [usual_ks(number) for number in (1, 4, 6)] == [[1], [1, 2, 4], [1, 2, 4, 6]]
