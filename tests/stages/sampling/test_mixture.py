"""The mixture's orders, shuffles, positions and refusals."""

from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages.sampling.mixture import (
    MixtureError,
    MixturePosition,
    MixtureStream,
    draw,
    epoch_draws,
    plan_mixture,
    position_at,
    shuffled_row,
    start,
)

weights = st.one_of(st.integers(1, 50).map(float), st.floats(0.05, 20).map(lambda w: round(w, 3)))
stream_lists = st.lists(st.tuples(st.integers(1, 30), weights), min_size=1, max_size=6).map(
    lambda rows: [MixtureStream(name=f"s{i}", num_rows=n, sampling_weight=w) for i, (n, w) in enumerate(rows)]
)


def _streams(*rows: tuple[str, int, float]) -> list[MixtureStream]:
    return [MixtureStream(name=name, num_rows=n, sampling_weight=w) for name, n, w in rows]


def _draw_many(mixture, n: int, position: MixturePosition | None = None):
    position = position or start(mixture)
    draws = []
    for _ in range(n):
        drawn, position = draw(mixture, position)
        draws.append(drawn)
    return draws, position


@given(stream_lists)
def test_the_quota_order_keeps_every_prefix_within_one_of_the_weights_until_a_stream_is_exhausted(streams) -> None:
    mixture = plan_mixture(streams, order="quota")
    total = sum(Fraction(repr(s.sampling_weight)) for s in streams)
    shares = {s.name: Fraction(repr(s.sampling_weight)) / total for s in streams}
    rows = {s.name: s.num_rows for s in streams}
    counted: Counter[str] = Counter()
    for n, drawn in enumerate(epoch_draws(mixture), 1):
        counted[drawn.stream] += 1
        for name, share in shares.items():
            assert abs(counted[name] - n * share) < 1
        if any(counted[name] == rows[name] for name in rows):
            break


@given(stream_lists)
def test_after_an_exhausted_stream_the_quota_order_holds_again_among_the_rest(streams) -> None:
    mixture = plan_mixture(streams, order="quota")
    position = start(mixture)
    for _ in range(mixture.epoch_size):
        open_streams = [i for i, c in enumerate(mixture.counts) if position.emitted[i] < c]
        total = sum(mixture.integer_weights[i] for i in open_streams)
        _, after = draw(mixture, position)
        if after.epoch == 0 and after.settled == position.settled:
            taken = {i: after.emitted[i] - after.settled[i] for i in open_streams}
            for i in open_streams:
                assert abs(taken[i] - Fraction(sum(taken.values()) * mixture.integer_weights[i], total)) < 1
        position = after


@given(
    stream_lists, st.sampled_from(["smallest_next", "quota"]), st.one_of(st.none(), st.integers(0, 2**40)), st.data()
)
def test_a_position_resumes_exactly_where_a_cursor_points(streams, order, seed, data) -> None:
    mixture = plan_mixture(streams, order=order, seed=seed)
    cursor = data.draw(st.integers(0, 3 * mixture.epoch_size))
    whole, _ = _draw_many(mixture, cursor + 5)
    resumed, _ = _draw_many(mixture, 5, position_at(mixture, cursor))
    assert whole[cursor:] == resumed


@given(stream_lists, st.sampled_from(["smallest_next", "quota"]), st.integers(0, 2**40), st.integers(0, 5))
def test_an_epoch_of_the_union_draws_each_row_once(streams, order, seed, epoch) -> None:
    draws = epoch_draws(plan_mixture(streams, order=order, seed=seed), epoch)
    assert sorted((d.stream, d.row) for d in draws) == sorted((s.name, r) for s in streams for r in range(s.num_rows))


@given(stream_lists, st.data())
def test_a_smaller_epoch_is_allocated_whole_and_within_capacity(streams, data) -> None:
    union = sum(s.num_rows for s in streams)
    size = data.draw(st.integers(1, union))
    mixture = plan_mixture(streams, epoch_size=size)
    assert mixture.epoch_size == size
    assert all(0 <= c <= s.num_rows for c, s in zip(mixture.counts, streams, strict=True))


def test_five_steps_of_eight_prompts_give_the_exact_totals_and_carry_the_remainder() -> None:
    for scale in (0.1, 1):
        rows = _streams(
            ("A", 100, round(5 * scale, 3)), ("B", 100, round(3 * scale, 3)), ("C", 100, round(2 * scale, 3))
        )
        draws, _ = _draw_many(plan_mixture(rows, order="quota"), 40)
        assert Counter(d.stream for d in draws) == {"A": 20, "B": 12, "C": 8}
        for n in range(1, 41):
            counted = Counter(d.stream for d in draws[:n])
            assert all(abs(counted[name] - n * w) < 1 for name, w in (("A", 0.5), ("B", 0.3), ("C", 0.2)))


@pytest.mark.parametrize("order", ["smallest_next", "quota"])
def test_weights_of_five_three_two_behave_as_their_fractions(order) -> None:
    whole = plan_mixture(_streams(("A", 50, 5), ("B", 50, 3), ("C", 50, 2)), order=order, seed=3)
    parts = plan_mixture(_streams(("A", 50, 0.5), ("B", 50, 0.3), ("C", 50, 0.2)), order=order, seed=3)
    assert epoch_draws(whole) == epoch_draws(parts)


def test_the_default_order_may_deviate_by_one_and_a_half_where_the_quota_order_does_not() -> None:
    rows = _streams(("a", 500, 5), ("b", 300, 3), ("c", 100, 1), ("d", 100, 1))
    worst = {}
    for order in ("smallest_next", "quota"):
        counted: Counter[str] = Counter()
        worst[order] = 0.0
        for n, drawn in enumerate(_draw_many(plan_mixture(rows, order=order), 100)[0], 1):
            counted[drawn.stream] += 1
            worst[order] = max(worst[order], *(abs(counted[s.name] - n * s.sampling_weight / 10) for s in rows))
    assert worst["smallest_next"] == pytest.approx(1.5)
    assert worst["quota"] < 1


def test_a_stream_is_drawn_by_its_weight_whatever_became_of_its_rows() -> None:
    draws, _ = _draw_many(plan_mixture(_streams(("A", 10, 0.5), ("B", 10, 0.5)), order="quota"), 100)
    assert Counter(drawn.stream for drawn in draws) == {"A": 50, "B": 50}
    assert set(Counter(drawn.row for drawn in draws if drawn.stream == "B").values()) == {5}


def test_a_stream_that_is_truly_empty_is_an_error_naming_it() -> None:
    with pytest.raises(MixtureError, match="'B'"):
        plan_mixture(_streams(("A", 10, 0.5), ("B", 0, 0.5)))


@pytest.mark.parametrize("weight", [-1.0, 0.0, float("nan"), float("inf")])
def test_a_weight_that_is_not_finite_and_positive_is_refused_by_name(weight) -> None:
    with pytest.raises(MixtureError, match="'B'"):
        plan_mixture(_streams(("A", 3, 1), ("B", 3, weight)))


def test_sizes_outside_their_bounds_are_refused_with_the_bounds() -> None:
    rows = _streams(("A", 3, 1), ("B", 3, 1))
    with pytest.raises(MixtureError, match=r"0 .* to 6"):
        plan_mixture(rows, epoch_size=7)
    with pytest.raises(MixtureError, match="divisible by the 4"):
        plan_mixture(rows, epoch_size=6, size_multiple=4)
    with pytest.raises(MixtureError, match="1 or more"):
        plan_mixture(rows, size_multiple=0)
    with pytest.raises(MixtureError, match="unique"):
        plan_mixture(_streams(("A", 3, 1), ("A", 3, 1)))
    with pytest.raises(MixtureError, match="at least one stream"):
        plan_mixture([])
    with pytest.raises(MixtureError, match="cursor"):
        position_at(plan_mixture(rows), -1)


@given(st.integers(1, 3000), st.integers(0, 2**63), st.integers(0, 10**6))
def test_a_shuffle_is_a_permutation(num_rows, seed, epoch) -> None:
    rows = [shuffled_row(i, num_rows=num_rows, seed=seed, epoch=epoch, name="s") for i in range(min(num_rows, 400))]
    assert len(set(rows)) == len(rows)
    assert all(0 <= row < num_rows for row in rows)


def test_shuffles_differ_by_seed_epoch_and_stream_and_use_every_order() -> None:
    def order(seed: int, epoch: int, name: str) -> tuple[int, ...]:
        return tuple(shuffled_row(i, num_rows=50, seed=seed, epoch=epoch, name=name) for i in range(50))

    assert len({order(1, 0, "a"), order(2, 0, "a"), order(1, 1, "a"), order(1, 0, "b")}) == 4
    seen = Counter(tuple(shuffled_row(i, num_rows=3, seed=s, epoch=0, name="a") for i in range(3)) for s in range(3000))
    assert len(seen) == 6
    assert min(seen.values()) > 350
