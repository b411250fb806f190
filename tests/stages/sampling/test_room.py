"""Sampling issues no more groups than find room in the store."""

from __future__ import annotations

import sys
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent))

from sampling_run import Run

from schemas.messages.sampling import Retain, RunStarted
from stages.sampling.credit import available
from stages.sampling.fold import SamplingFold


def begun(run: Run) -> int:
    return len(run.state.running) + len(run.state.waiting)


def room(ordinal: int, groups: int | None) -> Retain:
    return Retain(ordinal=ordinal, sequence=1, held_by="", issue_below=groups)


@given(
    st.integers(0, 100), st.integers(0, 100), st.integers(1, 16), st.integers(0, 8), st.integers(0, 200), st.booleans()
)
def test_only_whole_steps_are_begun_that_find_room_and_a_step_that_is_begun_is_completed(
    running: int, waiting: int, per_step: int, staleness: int, places: int, trains: bool
) -> None:
    credit = available(
        running=running,
        waiting=waiting,
        groups_per_step=per_step,
        max_staleness=staleness if trains else None,
        max_concurrent=10_000,
        room=places,
    )
    begun = running + waiting
    if trains and 0 < begun < per_step:
        assert begun + credit.groups >= per_step, "else what is begun is trained never"
    elif trains and credit.groups < (staleness + 1) * per_step - begun:
        assert (begun + credit.groups) % per_step == 0 or not credit.groups
    if not trains or not 0 < begun < per_step:
        assert credit.groups <= places
    if not begun and places < per_step and trains:
        assert (credit.groups, credit.bound_by) == (0, "store full")


def test_a_mark_that_says_nothing_of_room_changes_nothing() -> None:
    run = Run(prompts={"a": 100}, max_staleness=9)
    run.state.running = {}
    run.state.issue_below = run.state.num_issued + 4
    assert len(run.say(room(1, None))) == 4
    assert run.state.issue_below == run.state.num_issued


def test_a_start_bounds_only_what_nobody_measured_yet() -> None:
    fold = SamplingFold(Run(prompts={"a": 4}).settings)
    state = fold.initial()
    for message, expected in (
        (RunStarted(ordinal=0, config_json=b"", config_digest="", headrace_version="0", issue_below=4), 4),
        (room(1, 10), 10),
        (RunStarted(ordinal=1, config_json=b"", config_digest="", headrace_version="0", issue_below=2), 10),
        (room(2, 0), 0),
    ):
        fold.step(state, message)
        assert state.issue_below == expected


def test_more_room_lets_more_groups_in_by_whole_steps() -> None:
    run = Run(prompts={"a": 100}, max_staleness=9, max_concurrent_groups=100)
    assert begun(run) == 20
    run.state.running = dict.fromkeys(list(run.state.running)[:4])
    issued = [len(run.say(room(number, below))) for number, below in enumerate((20, 21, 22, 25, 28))]
    assert issued == [0, 0, 2, 2, 4]


def test_a_step_that_lost_a_group_gets_another_without_room() -> None:
    run = Run(prompts={"a": 100}, max_staleness=9, max_concurrent_groups=100)
    run.state.running = dict.fromkeys(list(run.state.running)[:2])
    run.say(room(1, 0))
    (lost, _) = run.state.running
    assert len(run.close(lost, usable=False)) == 1
