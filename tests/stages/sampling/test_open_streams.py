"""Streams whose rows are drawn as they are published."""

from __future__ import annotations

import sys
from fractions import Fraction
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent))

from sampling_run import Run

from schemas.config_arena import WhenEmpty
from schemas.messages.sampling import GroupIssued, PromptPublished, StreamListed
from schemas.payload import inline_ref, run_ref
from stages.sampling.open_streams import (
    OpenStream,
    OpenStreamSettings,
    Taker,
    add_row,
    next_turn,
    take_row,
    takers,
)

PASS = (OpenStreamSettings(name="o", weight=1.0),)
WAIT = (OpenStreamSettings(name="o", weight=1.0, when_empty=WhenEmpty.WAIT),)


def _open(prompts: dict[str, int] | None = None, *, streams=PASS, **changes) -> Run:
    return Run(prompts=prompts or {}, open_streams=streams, **{"max_staleness": 9, "groups_per_step": 2, **changes})


def publish(run: Run, data_id: str, stream: str = "o") -> list[GroupIssued]:
    return run.say(PromptPublished(stream=stream, data_id=data_id, prompt=inline_ref(data_id.encode())))


def close(run: Run, stream: str = "o") -> list[GroupIssued]:
    return run.say(StreamListed(stream=stream, rows=run_ref(b""), num_rows=0, weight=1.0))


def test_a_row_is_issued_when_it_is_published_and_its_prompt_is_stored_before() -> None:
    run = _open()
    assert run.fold.describe(run.state)[0] == "prompts on stream o"
    output = run.fold.step(run.state, PromptPublished(stream="o", data_id="x", prompt=inline_ref(b'"hello"')))[0]
    assert (output.message.stream, output.message.data_id, output.message.epoch) == ("o", "x", 0)
    assert output.message.prompt == run_ref(b'"hello"')
    assert output.payloads == (b'"hello"',)


def test_a_prompt_that_is_published_again_is_drawn_once() -> None:
    run = _open()
    assert len(publish(run, "x")) == 1
    assert publish(run, "x") == []


def test_rows_without_credit_wait_and_are_drawn_in_the_order_of_publication() -> None:
    run = _open(max_staleness=0)
    for name in "dcba":
        publish(run, name)
    assert [issued.data_id for issued in run.issued] == ["d", "c"]
    assert run.fold.describe(run.state)[1]["prompts_waiting.o"] == 2
    run.close("g0000000", usable=False)
    run.close("g0000001", usable=False)
    assert [issued.data_id for issued in run.issued] == ["d", "c", "b", "a"]


def test_prompts_of_other_streams_are_not_drawn() -> None:
    run = _open()
    assert publish(run, "x", stream="elsewhere") == []


def test_beside_a_listed_stream_an_open_one_gets_its_share_and_the_listed_one_its_epochs() -> None:
    run = _open({"a": 3}, max_staleness=0, groups_per_step=1)
    for number in range(6):
        publish(run, f"o{number}")
    while len(run.issued) < 12:
        run.close(run.issued[-1].group, usable=False)
    assert [issued.stream for issued in run.issued[1:]].count("o") in (5, 6)
    listed = [issued for issued in run.issued if issued.stream == "a"]
    assert [issued.data_id for issued in listed[:6]] == ["a0", "a1", "a2"] * 2
    assert [issued.epoch for issued in listed[:6]] == [0, 0, 0, 1, 1, 1]


def test_a_turn_without_a_prompt_passes_is_counted_and_is_not_owed() -> None:
    run = _open({"a": 50}, max_staleness=0, groups_per_step=1)
    for _ in range(9):
        run.close(run.issued[-1].group, usable=False)
    assert {issued.stream for issued in run.issued} == {"a"}
    assert run.fold.describe(run.state)[1]["turns_passed.o"] == 9
    for number in range(20):
        publish(run, f"o{number}")
    for _ in range(20):
        run.close(run.issued[-1].group, usable=False)
    assert sorted(issued.stream for issued in run.issued[-20:]) == ["a"] * 10 + ["o"] * 10


def test_a_stream_that_is_waited_for_holds_the_weights_exactly() -> None:
    run = _open({"a": 50}, streams=WAIT, max_staleness=4)
    assert [issued.stream for issued in run.issued] == ["a"]
    assert run.fold.describe(run.state)[0] == "prompts on stream o"
    assert [issued.stream for issued in publish(run, "x")] == ["o", "a"]
    assert run.state.open["o"].passed == 0


def test_a_closed_stream_is_drawn_to_its_end_and_then_leaves_its_turns_to_the_others() -> None:
    run = _open({"a": 50}, streams=WAIT, max_staleness=4)
    publish(run, "x")
    assert len(close(run)) > 1
    assert publish(run, "y") == []
    assert run.state.open["o"].passed == 0
    assert [issued.stream for issued in run.issued].count("o") == 1


def test_a_run_of_open_streams_ends_when_they_are_closed_and_used_up() -> None:
    run = _open()
    for number in range(5):
        publish(run, f"o{number}")
    for issued in list(run.issued):
        run.close(issued.group)
    run.train()
    close(run)
    assert run.finished == []
    run.train()
    assert (run.finished[0].steps, run.finished[0].reason) == (2, "streams")
    assert run.fold.describe(run.state)[0] == "nothing: the run is finished"


def test_steps_end_a_run_whose_stream_is_still_open() -> None:
    run = _open(steps=1)
    for number in range(5):
        publish(run, f"o{number}")
    assert len(run.issued) == 2
    run.close("g0000000")
    run.close("g0000001")
    run.train()
    assert run.finished[0].reason == "steps"


EVENTS = st.lists(st.sampled_from(["publish o", "publish p", "close group", "drop group", "train"]), max_size=60)


def _play(run: Run, events: list[str], *, crash_at: int | None = None) -> list[GroupIssued]:
    for number, event in enumerate(events):
        if number == crash_at:
            run.restore()
        match event:
            case "publish o" | "publish p":
                publish(run, f"{event[-1]}{number}", event[-1])
            case "train" if len(run.waiting) >= run.settings.groups_per_step:
                run.train()
            case "close group" | "drop group" if run.state.running:
                run.close(next(iter(run.state.running)), usable=event == "close group")
            case _:
                pass
    return run.issued


def _two(when_empty: WhenEmpty, weights: tuple[float, float]) -> tuple[OpenStreamSettings, ...]:
    return (
        OpenStreamSettings(name="o", weight=weights[0], when_empty=when_empty),
        OpenStreamSettings(name="p", weight=weights[1]),
    )


WEIGHT = st.sampled_from([0.1, 0.5, 1.0, 3.0])


@given(EVENTS, st.sampled_from(WhenEmpty), st.tuples(WEIGHT, WEIGHT), st.booleans(), st.data())
def test_a_resumed_fold_issues_what_an_undisturbed_one_does(events, when_empty, weights, listed, data) -> None:
    crash_at = data.draw(st.integers(0, max(0, len(events) - 1)))
    prompts = {"a": 3} if listed else {}
    undisturbed = _play(_open(prompts, streams=_two(when_empty, weights), max_staleness=1), events)
    resumed = _play(_open(prompts, streams=_two(when_empty, weights), max_staleness=1), events, crash_at=crash_at)
    assert [msgspec.msgpack.encode(one) for one in resumed] == [msgspec.msgpack.encode(one) for one in undisturbed]


@given(EVENTS, st.sampled_from(WhenEmpty), st.tuples(WEIGHT, WEIGHT))
def test_each_published_row_is_drawn_once_in_order_and_none_is_held_back(events, when_empty, weights) -> None:
    run = _open(streams=_two(when_empty, weights), max_staleness=99)
    _play(run, events)
    for name in "op":
        published = [f"{name}{number}" for number, event in enumerate(events) if event == f"publish {name}"]
        drawn = [issued.data_id for issued in run.issued if issued.stream == name]
        assert drawn == published[: len(drawn)]
        if when_empty is WhenEmpty.PASS:
            assert drawn == published


@given(st.lists(st.tuples(WEIGHT, st.integers(0, 3)), min_size=1, max_size=4), st.integers(1, 60))
def test_turns_keep_the_weights_whatever_is_empty_at_first(streams, num_turns) -> None:
    """From when all have rows, each stream is within two rows of its share."""
    settings = [OpenStreamSettings(name=f"s{i}", weight=weight) for i, (weight, _) in enumerate(streams)]
    state = {f"s{i}": OpenStream() for i in range(len(streams))}

    def turn() -> str | None:
        found = next_turn(takers(settings, state, listed_weights=[1.0], listed_turns=listed[0]))
        for name, number in found.passed.items():
            assert number > 0
            state[name].turns += number
        if found.name == "":
            listed[0] += 1
        elif found.name is not None:
            state[found.name].turns += 1
            take_row(state[found.name])
        return found.name

    listed = [0]
    for i, (_, rows) in enumerate(streams):
        for number in range(rows):
            add_row(state[f"s{i}"], PromptPublished(stream="", data_id=f"{number}", prompt=run_ref(b"")))
    for _ in range(20):
        assert turn() is not None
    for i in range(len(streams)):
        for number in range(10, 10 + num_turns):
            add_row(state[f"s{i}"], PromptPublished(stream="", data_id=f"{number}", prompt=run_ref(b"")))
    drawn = [turn() for _ in range(num_turns)]
    total = 1.0 + sum(weight for weight, _ in streams)
    for i, (weight, _) in enumerate(streams):
        assert abs(drawn.count(f"s{i}") - num_turns * weight / total) <= 2


def test_a_stream_of_great_weight_that_is_empty_costs_no_walk_through_its_turns() -> None:
    heavy = Taker(name="x", weight=Fraction(10**12), turns=0, ready=False, waited_for=False)
    light = Taker(name="y", weight=Fraction(1), turns=0, ready=True, waited_for=False)
    assert next_turn([heavy, light]).passed == {"x": 10**12}


def test_many_rows_are_taken_in_order_while_the_taken_ones_are_let_go() -> None:
    stream = OpenStream()
    for number in range(5000):
        add_row(stream, PromptPublished(stream="o", data_id=str(number), prompt=run_ref(b"")))
    assert [take_row(stream).data_id for _ in range(4000)] == [str(number) for number in range(4000)]
    assert len(stream.rows) < 3000
    assert stream.num_waiting == 1000


@pytest.mark.parametrize(("closed", "over"), [(False, False), (True, True)])
def test_an_empty_stream_is_over_only_once_it_is_closed(closed: bool, over: bool) -> None:
    assert OpenStream(closed=closed).over is over
