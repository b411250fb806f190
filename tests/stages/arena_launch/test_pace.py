"""When the launch stage looks at a task: soon where nothing is known, seldom where tasks take long, never too often together."""

import contextlib

import pytest

from stages.arena_launch.polling import Pace


def test_the_first_look_at_an_unknown_streams_task_comes_soon_and_waits_grow_to_the_interval() -> None:
    pace = Pace(5.0)
    waits = [pace.wait_s("s", age, 0.5) for age in (0, 0.1, 1, 4, 10, 1000)]
    assert waits == pytest.approx([0.1, 0.1, 0.5, 2, 5, 5])


def test_a_stream_of_long_tasks_is_first_looked_at_shortly_before_its_quickest_would_end() -> None:
    pace = Pace(5.0)
    for seconds in (60, 80, 70):
        pace.ended("slow", seconds)
    assert pace.wait_s("slow", 0, 0.5) == pytest.approx(54)
    assert pace.wait_s("slow", 54, 0.5) == pytest.approx(5)
    assert pace.wait_s("other", 0, 0.5) == pytest.approx(0.1)


def test_a_task_that_fails_at_once_is_seen_within_a_minute_however_long_its_siblings_took() -> None:
    pace = Pace(5.0)
    pace.ended("hours", 7200)
    assert pace.wait_s("hours", 0, 0.5) == pytest.approx(60)


def test_all_looks_of_a_process_together_stay_below_a_rate() -> None:
    pace = Pace(5.0, max_looks_per_s=100)
    with contextlib.ExitStack() as stack:
        for _ in range(2000):
            stack.enter_context(pace.watching())
        assert pace.wait_s("s", 0, 0.5) == pytest.approx(20)
        assert pace.wait_s("s", 1000, 0.5) == pytest.approx(20)
    assert pace.wait_s("s", 0, 0.5) == pytest.approx(0.1)


def test_looks_are_spread_over_a_quarter_of_their_wait() -> None:
    pace = Pace(5.0)
    waits = [pace.wait_s("s", 100, unit / 10) for unit in range(10)]
    assert min(waits) == pytest.approx(4.375)
    assert max(waits) < 5.625
    assert len(set(waits)) == 10


def test_lateness_is_told_at_its_99th_percentile() -> None:
    pace = Pace(5.0)
    assert pace.lateness_p99_s() == 0
    for late in range(100):
        pace.looked(late / 100)
    assert pace.lateness_p99_s() == pytest.approx(0.99)
