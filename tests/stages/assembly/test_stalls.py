"""A run whose groups never train ends and says why; a slow or paused one doesn't."""

import pytest
from assembly_log import (
    closed,
    fold_all,
    issued,
    settings,
    started,
    tick,
    trajectory,
    whole_group,
)

from schemas.messages.sampling import Control, ControlAction
from stages.assembly.fold import AssemblyFold, StalledError
from stages.assembly.stall import StallSettings

QUICK = StallSettings(rounds=2, seconds=10.0, warn_every_s=4.0)


def stalled(num_groups: int, ticks: range):
    fold = AssemblyFold(settings(filter_zero_spread=True, stall=QUICK))
    state, _ = fold_all(fold, [tick(1), *(m for ordinal in range(num_groups) for m in whole_group(ordinal, [1, 1]))])
    for ordinal in ticks:
        fold.step(state, tick(ordinal))
    return fold, state


def test_enough_rounds_and_enough_time_without_a_trainable_group_end_the_run():
    fold, state = stalled(2, range(2, 13))
    with pytest.raises(StalledError, match=r"2 rounds .2 groups closed: zero_spread: 2.*same reward"):
        fold.refuse_stall(state)


def test_a_burst_of_rejects_alone_does_not_end_it():
    fold, state = stalled(500, range(2, 11))
    assert state.stall.num_closed == 500
    fold.refuse_stall(state)


def test_time_alone_does_not_end_it():
    fold, state = stalled(1, range(2, 5000, 100))
    fold.refuse_stall(state)


def test_a_service_without_work_is_no_stall_and_its_groups_are_named():
    fold = AssemblyFold(settings(stall=QUICK))
    why = "LOCAL_UNCLAIMED: no session claimed it within 60 s"
    unclaimed = [
        message
        for ordinal in range(4)
        for message in (issued(ordinal, slots=2), *(trajectory(ordinal, slot, None, rejected=why) for slot in range(2)))
    ]
    state, outputs = fold_all(fold, [tick(1), *unclaimed, *(tick(ordinal) for ordinal in range(2, 50))])
    assert [one.reason for one in closed(outputs)] == ["unclaimed"] * 4
    fold.refuse_stall(state)


def test_a_stall_that_was_mended_can_be_folded_past():
    fold, state = stalled(2, range(2, 14))
    fold.step(state, started(1))
    fold.refuse_stall(state)
    (closing, step) = [output for message in whole_group(2, [1, 0]) for output in fold.step(state, message)]
    assert (closing.message.usable, step.message.groups) == (True, ["g0000002"])


def test_a_new_start_has_the_full_time_again():
    fold, state = stalled(2, range(2, 14))
    fold.step(state, started(1))
    for message in (m for ordinal in (2, 3) for m in whole_group(ordinal, [1, 1])):
        fold.step(state, message)
    for ordinal in range(14, 23):
        fold.step(state, tick(ordinal))
    fold.refuse_stall(state)
    fold.step(state, tick(23))
    with pytest.raises(StalledError, match="2 rounds"):
        fold.refuse_stall(state)


def test_a_pause_is_no_stall():
    fold, state = stalled(2, range(2, 6))
    fold.step(state, Control(id="a", action=ControlAction.PAUSE))
    for ordinal in range(6, 500):
        fold.step(state, tick(ordinal))
    fold.step(state, Control(id="b", action=ControlAction.RESUME))
    for ordinal in range(500, 505):
        fold.step(state, tick(ordinal))
    fold.refuse_stall(state)
    fold.step(state, tick(505))
    with pytest.raises(StalledError, match="for 10 s"):
        fold.refuse_stall(state)


def test_a_trainable_group_starts_the_count_anew():
    fold, state = stalled(2, range(2, 9))
    for message in whole_group(2, [1, 0]):
        fold.step(state, message)
    fold.step(state, tick(12))
    assert (state.stall.num_closed, state.stall.warning) == (0, "")


def test_warnings_come_at_most_once_a_period(capsys):
    fold, state = stalled(2, range(2, 11))
    printed = capsys.readouterr().out
    assert printed.count("adds nothing to train") == 3  # at ticks 2, 6 and 10
    assert "all groups of a stream were dropped" in printed
    assert "zero_spread: 2" in fold.describe(state)[0]
