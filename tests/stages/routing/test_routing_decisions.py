"""The router's pure decisions: choosing, limits, quarantine, admission."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from schemas.messages.engines import EngineAnnouncement, EngineState
from stages.routing.admission import not_admitted
from stages.routing.choosing import Candidate, choose
from stages.routing.concurrency import decreased, increased, slots
from stages.routing.quarantine import Quarantine, quarantined

candidates = st.lists(
    st.builds(
        Candidate,
        name=st.sampled_from([f"engine-{number}" for number in range(6)]),
        version=st.integers(0, 4),
        in_flight=st.integers(0, 9),
        others=st.integers(0, 9),
        limit=st.integers(1, 8),
        kept_away=st.sampled_from(["", "", "", "quarantined: refused"]),
    ),
    unique_by=lambda one: one.name,
    max_size=6,
)


@given(candidates, st.integers(0, 5), st.sampled_from(["", "engine-0", "engine-1", "elsewhere"]))
def test_only_an_engine_in_service_with_room_and_the_version_is_chosen(found, min_version, home) -> None:
    choice = choose(found, min_version=min_version, home=home)
    able = [one for one in found if not one.kept_away and one.version >= min_version]
    free = [one for one in able if one.in_flight < one.limit]
    if not free:
        assert not choice.name
        assert choice.reason
        assert choice.full == bool(able)
        return
    chosen = next(one for one in free if one.name == choice.name)
    least = min(one.load for one in free)
    assert chosen.load == least or (chosen.name == home and chosen.load <= least + 0.25)


@given(candidates, st.integers(0, 5), st.randoms())
def test_the_choice_does_not_depend_on_the_order_of_the_engines(found, min_version, random) -> None:
    shuffled = list(found)
    random.shuffle(shuffled)
    assert choose(found, min_version=min_version).name == choose(shuffled, min_version=min_version).name


def candidate(name: str, **fields) -> Candidate:
    return Candidate(**{"name": name, "version": 3, "in_flight": 0, "limit": 8, **fields})


def test_a_session_stays_with_its_engine_until_that_one_is_overloaded_gone_or_too_old() -> None:
    def chosen(home: Candidate, **asked) -> str:
        return choose([candidate("other", in_flight=1), home], home="home", **{"min_version": 3, **asked}).name

    assert chosen(candidate("home", in_flight=3)) == "home"
    assert chosen(candidate("home", in_flight=4)) == "other"
    assert chosen(candidate("home", in_flight=1, others=4)) == "other"
    assert chosen(candidate("home", kept_away="quarantined: refused")) == "other"
    assert chosen(candidate("home", version=2)) == "other"
    assert choose([candidate("other")], min_version=0, home="home").name == "other"


def test_a_wait_says_what_it_waits_for() -> None:
    found = [candidate("a", version=6), candidate("b", kept_away="starting: the server starts")]
    reason = "an engine with version 7 or newer: a serves version 6; b starting: the server starts"
    assert choose(found, min_version=7).reason == reason
    assert choose([], min_version=0).reason == "an engine: none has joined"
    full = choose([candidate("a", in_flight=8)], min_version=3)
    assert (full.reason, full.full) == ("every engine is full: a 8/8", True)


@given(st.integers(1, 64), st.lists(st.booleans(), max_size=400))
def test_a_limit_stays_between_one_and_the_capacity(capacity: int, answers: list[bool]) -> None:
    limit = float(capacity)
    for fine in answers:
        before = limit
        limit = increased(limit, capacity) if fine else decreased(limit, capacity, 0.7)
        assert 1.0 <= limit <= capacity
        assert 1 <= slots(limit) <= capacity
        assert limit >= before if fine else limit <= before


@given(st.integers(2, 64))
def test_a_limit_grows_by_about_one_for_each_round_of_answers_and_finds_back_to_the_capacity(capacity: int) -> None:
    limit = decreased(float(capacity), capacity, 0.5)
    start = limit
    for _ in range(slots(limit)):
        limit = increased(limit, capacity)
    assert start + 0.5 <= limit <= start + 1.0 + 1e-9 or limit == capacity
    for _ in range(capacity * capacity):
        limit = increased(limit, capacity)
    assert limit == capacity


def test_failures_during_a_quarantine_do_not_lengthen_it_and_failed_probes_double_it() -> None:
    def failed(before: Quarantine | None, now_s: float) -> Quarantine:
        return quarantined(before, "refused", now_s, first_s=1.0, max_s=5.0)

    first = failed(None, 10.0)
    assert (first.failures, first.until_s) == (1, 11.0)
    assert failed(first, 10.5) is first
    second = failed(first, 11.0)
    assert (second.failures, second.until_s) == (2, 13.0)
    third = failed(second, 13.0)
    fourth = failed(third, third.until_s)
    assert fourth.until_s - third.until_s == 5.0


def announced(version: int, state: EngineState = EngineState.SERVING, refused: int = -1) -> EngineAnnouncement:
    return EngineAnnouncement(name="b", kind="vllm", state=state, version=version, refused_version=refused)


def test_a_joining_engine_needs_the_current_weights() -> None:
    assert not_admitted(announced(12), published=12, fleet=[12, 11]) == ""
    assert "version 0 and the others serve 12" in not_admitted(announced(0), published=12, fleet=[12])
    assert "version 0 and 12 is published" in not_admitted(announced(0), published=12, fleet=[])
    assert "loading" in not_admitted(announced(12, EngineState.LOADING), published=12, fleet=[])


def test_a_version_that_was_tried_and_refused_keeps_no_engine_out() -> None:
    assert not_admitted(announced(12, refused=13), published=13, fleet=[12]) == ""
    assert not_admitted(announced(11, refused=13), published=13, fleet=[12]) != ""
