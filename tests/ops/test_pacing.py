"""Pacing and staleness over whole runs of the real folds, in simulated time; every bound is checked from the log alone."""

from __future__ import annotations

import math

import msgspec
import pytest

from ops.bench import asynchrony
from ops.bench.pacing import Course, LivelockError, Pace, assembly_settings, sampling_settings, simulate
from schemas.messages.rollout import Trajectory
from schemas.messages.sampling import GroupClosed, GroupIssued, StreamRow
from schemas.messages.training import Manifest, StepAssembled, StepTrained
from stages.assembly.fold import AssemblyFold
from stages.sampling.credit import Credit, what_frees
from stages.sampling.fold import SamplingFold

LONG_TAIL = math.log(10) / 2.326
"""p99 is ten times the median."""


def pace(max_staleness: int, **changes) -> Pace:
    """A slow trainer and a slow broadcast beside a long-tailed generator."""
    settings = {
        "groups_per_step": 4,
        "slots_per_group": 4,
        "engine_slots": 4,
        "sigma": LONG_TAIL,
        "train_s": 2.0,
        "broadcast_s": 1.0,
        "steps": 100,
    }
    return Pace(max_staleness=max_staleness, **(settings | changes))


def scan(course: Course) -> list[int]:
    """The staleness of every trained row: (step - 1) - the version that its rollout began with, from the rollouts' own messages."""
    began = {row.row: row.min_version for one in course.log if isinstance(one, Trajectory) for row in one.rows}
    found: list[int] = []
    for message in course.log:
        if isinstance(message, StepAssembled):
            manifest = msgspec.msgpack.decode(course.payloads[message.manifest.id], type=Manifest)
            found += [message.step - 1 - began[row] for row in manifest.row_ids]
    return found


def steps_of(course: Course) -> list[int]:
    return [message.step for message in course.log if isinstance(message, StepTrained)]


@pytest.mark.parametrize("max_staleness", [0, 1, 4])
def test_no_trained_row_exceeds_the_bound_over_a_hundred_steps(max_staleness: int) -> None:
    course = simulate(pace(max_staleness))
    staleness = scan(course)
    assert steps_of(course) == list(range(1, 101))
    assert max(staleness) <= max_staleness
    assert min(staleness) >= 0
    assert course.trained_rows == len(staleness)


def test_without_staleness_generation_and_training_take_turns_and_nothing_is_dropped() -> None:
    course = simulate(pace(0))
    assert set(scan(course)) == {0}
    assert course.dropped_groups == {}
    assert course.finished_rollouts == course.trained_rows == 100 * 16


@pytest.mark.parametrize("max_staleness", [1, 4])
def test_the_engine_is_hardly_idle_once_one_version_may_lie_between(max_staleness: int) -> None:
    course, turns = simulate(pace(max_staleness)), simulate(pace(0))
    assert course.idle_share <= 0.05
    assert turns.idle_share > 0.3
    assert course.seconds < turns.seconds


def test_what_is_too_old_is_dropped_by_name_and_its_credit_comes_back() -> None:
    course = simulate(pace(1, engine_slots=12, train_s=3.0))
    assert course.dropped_groups.keys() == {"stale"}
    issued = [message.group for message in course.log if isinstance(message, GroupIssued)]
    closed = {message.group: message.usable for message in course.log if isinstance(message, GroupClosed)}
    trained = {group for message in course.log if isinstance(message, StepAssembled) for group in message.groups}
    dropped = {group.group for message in course.log if isinstance(message, StepAssembled) for group in message.dropped}
    assert len(trained) == 400
    assert not trained & dropped
    left = set(issued) - trained - dropped
    assert len(left) <= 2 * 4, "no credit leaked: what is neither trained nor dropped is what may be under way"
    assert all(closed.get(group, True) for group in left)


def test_at_most_what_the_formula_allows_is_ever_under_way() -> None:
    for max_staleness in (0, 1, 4):
        course = simulate(pace(max_staleness, steps=30))
        running: set[str] = set()
        waiting: set[str] = set()
        steps: dict[int, list[str]] = {}
        for message in course.log:
            match message:
                case GroupIssued():
                    running.add(message.group)
                    assert len(running) + len(waiting) <= (max_staleness + 1) * 4
                case GroupClosed():
                    running.discard(message.group)
                    if message.usable:
                        waiting.add(message.group)
                case StepAssembled():
                    steps[message.step] = message.groups
                    waiting -= {dropped.group for dropped in message.dropped}
                case StepTrained():
                    waiting -= set(steps[message.step])
                case _:
                    pass


def test_a_resumed_run_folds_to_the_same_state_and_the_same_decisions() -> None:
    wanted = pace(1, steps=20)
    course = simulate(wanted)
    rows = msgspec.msgpack.encode([StreamRow(data_id=f"p{number}") for number in range(997)])
    for fold, kind in (
        (SamplingFold(sampling_settings(wanted)), GroupIssued),
        (AssemblyFold(assembly_settings(wanted)), StepAssembled),
    ):
        state, said = fold.initial(), []
        for number, message in enumerate(course.log):
            if not any(topic.message is type(message) for topic in fold.consumes):
                continue
            if number % 97 == 0:  # killed: a new process starts from the checkpoint
                fold = type(fold)(fold._settings)  # noqa: PLW2901 - the same settings, nothing else remembered
                state = msgspec.msgpack.decode(msgspec.msgpack.encode(state), type=fold.state_type)
            for ref in (fold.wants(message), *fold.wanted_by(state)):
                if ref is not None:
                    fold.load(ref, memoryview(rows))
            said += [output.message for output in fold.step(state, message)]
        assert [one for one in said if isinstance(one, kind)] == [one for one in course.log if isinstance(one, kind)]


def test_a_broadcast_that_never_comes_is_told_as_what_everything_waits_for() -> None:
    with pytest.raises(LivelockError, match="engine at version 0; sampling: credit, bound by max_staleness"):
        simulate(pace(0, broadcast_s=math.inf, steps=3))


@pytest.mark.nightly
@pytest.mark.parametrize("max_staleness", [0, 1, 2, 4, 8])
@pytest.mark.parametrize("seed", [0, 1])
def test_bounds_hold_at_the_size_of_a_real_step(max_staleness: int, seed: int) -> None:
    course = simulate(
        pace(max_staleness, groups_per_step=16, slots_per_group=8, engine_slots=24, train_s=3.0, seed=seed)
    )
    assert max(scan(course)) <= max_staleness
    assert len(steps_of(course)) == 100
    if max_staleness:
        assert course.idle_share <= 0.05


@pytest.mark.parametrize(
    ("bound_by", "untrained_step", "text"),
    [
        ("max_concurrent_groups", 4, "group.closed of one of 7 running groups"),
        ("max_staleness", 4, "step.trained.4"),
        ("max_staleness", None, "group.closed of one of 7 running groups"),
        ("paused", None, "`headrace resume`"),
        ("end of run", 4, ""),
    ],
)
def test_status_names_the_message_that_frees_credit(bound_by: str, untrained_step: int | None, text: str) -> None:
    assert what_frees(Credit(groups=0, bound_by=bound_by), running=7, untrained_step=untrained_step) == text


def test_asynchrony_pays_at_the_tail_of_published_agentic_runs() -> None:
    seconds = {
        bound: simulate(msgspec.structs.replace(asynchrony.pace(LONG_TAIL, bound), steps=30)).seconds
        for bound in (0, 2)
    }
    assert seconds[0] / seconds[2] >= 2.5
