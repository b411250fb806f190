from __future__ import annotations

import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent))

from sampling_run import Run

from schemas.messages.sampling import (
    Control,
    ControlAction,
    Tick,
)
from schemas.messages.training import StepTrained
from stages.sampling.credit import available
from stages.sampling.fold import SamplingFold


def test_the_first_groups_are_issued_when_every_stream_is_listed() -> None:
    run = Run(prompts={"a": 10})
    assert [issued.group for issued in run.issued] == ["g0000000", "g0000001", "g0000002", "g0000003"]
    assert {issued.num_slots for issued in run.issued} == {4}
    assert run.fold.describe(run.state)[0].startswith("credit, bound by max_staleness")


def test_a_missing_stream_is_named() -> None:
    fold = SamplingFold(Run(prompts={"a": 1}).settings)
    assert fold.describe(fold.initial())[0] == "the rows of stream a"


# AReaL#1345: the capacity after a resume comes from what is under way, not from lifetime counters
@pytest.mark.parametrize(("running", "capacity"), [(0, 96), (20, 76)])
def test_capacity_after_a_resume_has_no_burst(running: int, capacity: int) -> None:
    credit = available(running=running, waiting=0, groups_per_step=32, max_staleness=2, max_concurrent=1000)
    assert credit.groups == capacity


@given(
    st.integers(0, 200),
    st.integers(0, 200),
    st.integers(1, 32),
    st.integers(0, 4),
    st.integers(1, 200),
    st.none() | st.integers(0, 50),
)
def test_credit_never_lets_more_under_way_than_its_limits(
    running, waiting, per_step, staleness, concurrent, needed
) -> None:
    credit = available(
        running=running,
        waiting=waiting,
        groups_per_step=per_step,
        max_staleness=staleness,
        max_concurrent=concurrent,
        still_needed=needed,
    )
    assert credit.groups >= 0
    if credit.groups:
        assert running + credit.groups <= concurrent
        assert running + waiting + credit.groups <= (staleness + 1) * per_step
        assert needed is None or credit.groups <= needed


def test_credit_comes_back_from_trained_and_from_dropped_groups() -> None:
    run = Run(prompts={"a": 50})
    assert run.close("g0000000", usable=False) != []
    assert run.close("g0000001") == []
    run.close("g0000002")
    assert len(run.train()) == 2


def test_a_group_dropped_from_waiting_gives_its_credit_back() -> None:
    run = Run(prompts={"a": 50})
    for group in ("g0000000", "g0000001", "g0000002"):
        run.close(group)
    assert len(run.train(dropped=("g0000002",))) == 3
    assert run.state.num_groups_dropped == 1


def test_a_request_carries_the_oldest_version_that_its_step_may_use() -> None:
    run = Run(prompts={"a": 50}, max_staleness=0)
    assert [issued.min_version for issued in run.issued] == [0, 0]
    run.close("g0000000")
    run.close("g0000001")
    assert [issued.min_version for issued in run.train()] == [1, 1]


# OpenRLHF#1322: prompts that were generated and not yet trained must not be skipped by a restart
def test_no_prompt_is_skipped_or_trained_twice_by_a_restart() -> None:
    run = Run(prompts={"a": 8}, epochs=1, max_staleness=2)
    trained: list[str] = []
    while not run.finished:
        for issued in run.issued:
            if issued.group in run.state.running:
                run.close(issued.group)
        trained += run.waiting[:2]
        run.train()
        run.restore()
    data = {issued.group: issued.data_id for issued in run.issued}
    assert sorted(data[group] for group in trained) == [f"a{i}" for i in range(8)]
    assert run.finished[0].steps == 4


# NeMo-RL#3248: min(max_steps, epochs · prompts / groups_per_step) steps, also after a resume
@pytest.mark.parametrize(
    ("steps", "epochs", "done", "reason"), [(10, 2, 6, "epochs"), (5, 2, 5, "steps"), (None, 1, 3, "epochs")]
)
def test_a_run_ends_at_whichever_limit_comes_first(steps, epochs, done, reason) -> None:
    run = Run(prompts={"a": 12}, steps=steps, epochs=epochs, groups_per_step=4)
    while not run.finished and run.step < 20:
        for issued in run.issued:
            if issued.group in run.state.running:
                run.close(issued.group)
        run.train()
        if run.step == 4:
            run.restore()
    assert (run.finished[0].steps, run.finished[0].reason) == (done, reason)
    if reason == "epochs":
        counts = [sum(issued.data_id == f"a{i}" for issued in run.issued) for i in range(12)]
        assert counts == [epochs] * 12


def test_a_later_start_moves_the_end_and_finishes_again() -> None:
    run = Run(prompts={"a": 50}, steps=1)
    run.close("g0000000")
    run.close("g0000001")
    assert run.train() == []
    assert [finished.ordinal for finished in run.finished] == [0]
    run.begin(steps=2)
    assert len(run.issued) == 4
    run.close("g0000002")
    run.close("g0000003")
    run.train()
    assert [finished.ordinal for finished in run.finished] == [0, 1]


def test_leftover_groups_that_make_no_step_end_the_run_instead_of_hanging_it() -> None:
    run = Run(prompts={"a": 3}, epochs=1)
    for issued in list(run.issued):
        run.close(issued.group)
    run.train()
    assert (run.finished[0].steps, run.finished[0].reason) == (1, "epochs")


@pytest.mark.parametrize("action", [ControlAction.PAUSE, ControlAction.DRAIN])
def test_pause_and_drain_stop_the_issue_and_resume_goes_on(action: ControlAction) -> None:
    run = Run(prompts={"a": 50})
    run.say(Control(id="1", action=action))
    assert run.close("g0000000", usable=False) == []
    assert len(run.say(Control(id="2", action=ControlAction.RESUME))) == 1


def test_a_deadline_is_counted_in_ticks() -> None:
    run = Run(prompts={"a": 50}, group_deadline_s=5.0, tick_period_s=2.0)
    assert run.issued[0].deadline_tick == 3
    run.say(Tick(ordinal=7, period_s=2.0, unix_time_s=0.0))
    assert run.close("g0000000", usable=False)[0].deadline_tick == 10


# surogate#73, NeMo-RL#3681: quotas are exact and every message carries its stream
def test_two_streams_share_by_weight_and_every_group_carries_its_stream() -> None:
    run = Run(prompts={"a": 100, "b": 100}, max_staleness=24, order="quota")
    streams = [issued.stream for issued in run.issued]
    assert streams.count("a") == streams.count("b") == 25
    assert all(issued.data_id.startswith(issued.stream) for issued in run.issued)


# surogate#73: an outage fails every group of one stream; nothing takes its rows out of the mixture, so it is drawn as before
def test_a_stream_whose_groups_are_all_dropped_keeps_its_share() -> None:
    run = Run(prompts={"a": 10, "b": 10}, order="quota", max_staleness=0)
    while len(run.issued) < 100:
        for group in list(run.state.running):
            stream = next(issued.stream for issued in run.issued if issued.group == group)
            run.close(group, usable=stream == "a")
        if len(run.waiting) >= run.settings.groups_per_step:
            run.train()
    drawn = [issued for issued in run.issued[:100] if issued.stream == "b"]
    assert len(drawn) == 50
    assert {issued.data_id for issued in drawn} == {f"b{number}" for number in range(10)}


def test_a_superseded_trainers_step_gives_no_credit():
    fold = SamplingFold(Run(prompts={"a": 4}).settings)
    state = fold.initial()
    for step, generation in ((1, 1), (2, 2), (5, 1)):
        fold.step(state, StepTrained(step=step, generation=generation, digest="", manifest_id=""))
    assert state.num_trained == 2
    fold.step(state, StepTrained(step=3, generation=2, digest="", manifest_id=""))
    assert state.num_trained == 3
