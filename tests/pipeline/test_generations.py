from hypothesis import given
from hypothesis import strategies as st

from pipeline.generations import Generations


def test_a_generation_is_heard_until_a_later_one_speaks():
    generations = Generations()
    assert [generations.admits(g) for g in (1, 1, 2, 1, 2, 3, 1, 2, 3)] == [1, 1, 1, 0, 1, 1, 0, 0, 1]


@given(st.lists(st.integers(1, 5)), st.integers(0, 5))
def test_what_is_heard_never_goes_back(told, newest):
    generations = Generations(newest)
    heard = [generation for generation in told if generations.admits(generation)]
    assert heard == sorted(heard)
    assert generations.newest == max([newest, *told])
