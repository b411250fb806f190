"""Evaluation streams: when they run, that they never hold training back, and that the run's end waits for them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent))

from sampling_run import Run

from schemas.messages.sampling import Control, ControlAction, StreamRow
from stages.sampling.evaluation import EvaluationPlan, EvaluationState, EvaluationStream, next_row, see_version

EVERY_2 = EvaluationStream(name="e", every_versions=2, slots=3)


def _run(rows: int = 2, **changes) -> Run:
    return Run(prompts={"a": 1000}, evaluated={"e": rows}, evaluations=(EVERY_2,), **changes)


def _evaluations(run: Run) -> list[tuple[int, str]]:
    return [(issued.min_version, issued.data_id) for issued in run.issued if issued.evaluation]


def _step(run: Run) -> None:
    for group in list(run.state.running)[:2]:
        run.close(group)
    run.train()


def test_version_0_is_evaluated_first_and_before_any_group_that_trains() -> None:
    run = _run()
    assert [issued.stream for issued in run.issued[:3]] == ["e", "e", "a"]
    assert _evaluations(run) == [(0, "e0"), (0, "e1")]
    assert {issued.num_slots for issued in run.issued if issued.evaluation} == {3}


def test_every_so_many_versions_each_row_is_evaluated_once() -> None:
    run = _run()
    for _ in range(4):
        for group in list(run.state.evaluating):
            run.close(group, usable=False)
        _step(run)
    assert _evaluations(run) == [(0, "e0"), (0, "e1"), (2, "e0"), (2, "e1"), (4, "e0"), (4, "e1")]


def test_training_goes_on_while_an_evaluation_never_ends() -> None:
    run = _run(rows=1000, max_concurrent_groups=10)
    assert len(run.state.evaluating) == 5
    for _ in range(6):
        _step(run)
    assert run.state.num_trained == 6
    assert len(run.state.evaluating) == 5


def test_one_that_had_not_begun_when_the_next_was_due_is_skipped_and_counted() -> None:
    run = _run(rows=20, max_concurrent_groups=20)
    for _ in range(6):
        _step(run)
    while run.state.evaluating:
        run.close(next(iter(run.state.evaluating)), usable=False)
    versions = [version for version, _ in _evaluations(run)]
    assert sorted(set(versions)) == [0, 6]
    assert versions.count(0) == versions.count(6) == 20
    assert run.fold.describe(run.state)[1]["evaluations_skipped"] == 2


def test_evaluation_groups_use_up_no_step_no_epoch_and_no_staleness() -> None:
    with_evaluation, without = _run(), Run(prompts={"a": 1000})
    trained = [issued.data_id for issued in with_evaluation.issued if not issued.evaluation]
    assert trained == [issued.data_id for issued in without.issued]
    run = Run(prompts={"a": 4}, evaluated={"e": 3}, evaluations=(EVERY_2,), epochs=1)
    assert sum(not issued.evaluation for issued in run.issued) == 4


def test_the_runs_end_is_said_when_the_last_evaluation_has_ended() -> None:
    run = _run(steps=2)
    _step(run)
    _step(run)
    assert run.finished == []
    while run.state.evaluating:
        run.close(next(iter(run.state.evaluating)), usable=False)
    assert [finished.steps for finished in run.finished] == [2]
    assert _evaluations(run)[-1] == (2, "e1")


def test_a_paused_run_evaluates_nothing() -> None:
    run = _run()
    run.say(Control(id="1", action=ControlAction.PAUSE))
    _step(run)
    _step(run)
    assert {version for version, _ in _evaluations(run)} == {0}


def test_after_a_crash_an_evaluation_goes_on_where_it_was() -> None:
    run = _run(rows=6, max_concurrent_groups=4)
    assert len(_evaluations(run)) == 2
    run.restore()
    while run.state.evaluating:
        run.close(next(iter(run.state.evaluating)), usable=False)
    assert _evaluations(run) == [(0, f"e{number}") for number in range(6)]


@given(st.integers(1, 5), st.lists(st.integers(0, 40), max_size=30), st.integers(1, 4))
def test_each_evaluation_that_begins_takes_every_row_in_order(every, versions, rows) -> None:
    stream = EvaluationStream(name="e", every_versions=every, slots=1)
    plan = EvaluationPlan(stream=stream, state=EvaluationState(), rows=[StreamRow(data_id=str(i)) for i in range(rows)])
    taken: dict[int, list[str]] = {}
    for version in [0, *sorted(versions)]:
        see_version(plan.state, stream, version)
        if (row := next_row(plan)) is not None:
            taken.setdefault(plan.state.version, []).append(row.data_id)
    while (row := next_row(plan)) is not None:
        taken.setdefault(plan.state.version, []).append(row.data_id)
    assert all(version % every == 0 for version in taken)
    assert all(found == [str(i) for i in range(rows)] for found in taken.values())
    assert max(taken) == max([0, *versions]) // every * every
    assert len(taken) + plan.state.num_skipped == max(taken) // every + 1


@pytest.mark.parametrize("evaluations", [(), (EVERY_2,)])
def test_a_run_without_evaluation_is_issued_as_before(evaluations) -> None:
    run = Run(prompts={"a": 10}, evaluated={"e": 0} if evaluations else {}, evaluations=evaluations)
    assert [issued.group for issued in run.issued if not issued.evaluation][:2] == ["g0000000", "g0000001"]
