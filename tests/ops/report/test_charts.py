"""Charts: round ticks that hold the values, points inside the frame, few points, safe names."""

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ops.report.charts import HEIGHT, WIDTH, Series, bars, line_chart, short, ticks

numbers = st.floats(min_value=-1e9, max_value=1e9, allow_nan=False)


@given(numbers, numbers)
def test_ticks_are_few_round_and_hold_the_values(a, b):
    low, high = min(a, b), max(a, b)
    found = ticks(low, high)
    margin = 1e-6 * max(1.0, abs(low), abs(high))
    assert 2 <= len(found) <= 8
    assert found[0] <= low + margin
    assert found[-1] >= high - margin
    assert found == sorted(set(found))


def test_ticks_of_whole_things_are_whole():
    assert ticks(1, 3, whole=True) == [1.0, 2.0, 3.0]


@given(st.lists(st.tuples(st.floats(0, 1e6), numbers), min_size=1, max_size=600))
def test_every_point_lies_in_the_frame_and_there_are_few(points):
    chart = line_chart([Series(name="a", points=sorted(points))], x_name="step")
    found = re.search(' points="([^"]*)"', chart)
    places = [tuple(map(float, place.split(","))) for place in found[1].split()] if found else []
    assert len(places) <= 240
    assert all(0 <= x <= WIDTH and 0 <= y <= HEIGHT for x, y in places)


def test_values_that_are_not_finite_are_left_out():
    chart = line_chart([Series(name="a", points=[(1, 1.0), (2, math.nan), (3, math.inf), (4, 2.0)])], x_name="step")
    assert len(re.findall("<circle", chart)) == 2


def test_a_chart_without_figures_says_so():
    assert "no figures" in line_chart([Series(name="a", points=[])], x_name="step")


def test_names_are_escaped():
    series = [Series(name="<b>", points=[(1, 1), (2, 2)]), Series(name="b", points=[(1, 1)])]
    for text in (line_chart(series, x_name="<i>"), bars([("<u>", 1.0, "<s>")])):
        assert not re.search("<[bus]>", text)
        assert "<i>" not in text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (5, "5"),
        (0.03125, "0.0312"),
        (1500, "1,500"),
        (20_000, "20k"),
        (2.5e6, "2.5M"),
        (1e-5, "1e-5"),
        (5.6e-4, "5.6e-4"),
        (-0.5, "-0.5"),
    ],
)
def test_numbers_are_short(value, text):
    assert short(value) == text
