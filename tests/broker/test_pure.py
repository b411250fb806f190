"""What needs no server: filters, names, the hand-out of a durable."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.api import ConsumerSettings, Record
from broker.memory.durable import Durable, Outstanding
from broker.naming import check_literal, check_log_filters, overlaps, run_names
from schemas.errors import InvalidIdError
from schemas.subjects import matches

TOKEN = st.sampled_from(["a", "b", "*"])
PATTERN = st.tuples(st.lists(TOKEN, min_size=1, max_size=4), st.booleans()).map(
    lambda parts: ".".join([*parts[0], *([">"] if parts[1] else [])])
)
SUBJECT = st.lists(st.sampled_from(["a", "b", "c"]), min_size=1, max_size=6).map(".".join)


@given(PATTERN, PATTERN, SUBJECT)
def test_filters_that_match_one_subject_overlap(first, second, subject):
    if matches(first, subject) and matches(second, subject):
        assert overlaps(first, second)
        assert overlaps(second, first)


@given(PATTERN, PATTERN)
def test_filters_that_overlap_match_a_common_subject(first, second):
    if overlaps(first, second):
        a, b = first.split("."), second.split(".")
        common = []
        for index in range(max(len(a), len(b))):
            tokens = {parts[index] if index < len(parts) else ">" for parts in (a, b)} - {"*", ">"}
            common.append(tokens.pop() if tokens else "a")
        assert matches(first, ".".join(common))
        assert matches(second, ".".join(common))


@pytest.mark.parametrize("subject", ["", ".", "a.", ".a", "a..b", "a b", "a.*", "a.>", "a\tb", "a\r\nPUB x"])
def test_a_subject_that_is_no_literal_is_refused(subject):
    with pytest.raises(InvalidIdError):
        check_literal(subject)


def test_filters_outside_of_the_run_are_refused():
    names = run_names("r")
    check_log_filters(names, ("hr.r.>",))
    for bad in ((), ("hr.other.>",), ("hrs.r.>",), (">",), ("hr.r.a*",), ("hr.r.>.a",)):
        with pytest.raises(InvalidIdError):
            check_log_filters(names, bad)


STEP = st.one_of(
    st.tuples(st.just("take"), st.integers(1, 3)),
    st.tuples(st.just("ack"), st.integers(0, 10)),
    st.tuples(st.just("retry"), st.integers(0, 10)),
    st.tuples(st.just("wait"), st.integers(1, 15)),
    st.tuples(st.just("append"), st.integers(1, 5)),
)


@given(st.lists(STEP, max_size=60))
def test_a_durable_hands_out_every_message_until_it_is_acknowledged_and_none_to_two_at_a_time(steps):
    log: dict[int, Record] = {}
    durable = Durable("d", ("hr.r.>",), ConsumerSettings(ack_wait_s=10, prefetch=3, max_ack_pending=5))
    now, held, acked = 0.0, dict[int, tuple[Outstanding, float]](), set[int]()

    def take(worker: int) -> None:
        item = durable.take(worker, now, log.get, len(log))
        if item is not None:
            sequence = item.record.sequence
            assert sequence not in acked
            assert sequence not in held or held[sequence][1] <= now, "held by somebody who still has time"
            held[sequence] = (item, now + 10)

    for what, number in steps:
        if what == "append":
            for _ in range(number):
                sequence = len(log) + 1
                log[sequence] = Record(subject=f"hr.r.{sequence}", sequence=sequence, data=b"", unix_time_s=0)
        elif what == "wait":
            now += number
        elif what == "take":
            take(number)
        elif held:
            sequence = sorted(held)[number % len(held)]
            item, _ = held.pop(sequence)
            if what == "ack":
                durable.ack(item)
                acked.add(sequence)
            else:
                durable.give_back(item, now)
        assert len(durable.out) <= 5
    for _ in range(2 * len(log) + 2):
        now += 11
        for worker in (7, 8):
            take(worker)
        for sequence, (item, _) in list(held.items()):
            durable.ack(item)
            acked.add(sequence)
            del held[sequence]
    assert acked == set(log)
    assert not durable.out
