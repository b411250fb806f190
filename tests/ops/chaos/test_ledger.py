"""A log that is in order gives no finding; each single thing that is wrong with it is found and named."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from ops.chaos.ledger import Findings, Ledger
from schemas.arrays import int32
from schemas.messages.rollout import (
    EpisodeClass,
    EpisodeEnded,
    FinishReason,
    InteractionRecorded,
    Row,
    SessionClosed,
    Trajectory,
)
from schemas.messages.sampling import DeadLetter, EpisodeRequested, GroupClosed, GroupIssued
from schemas.messages.training import DroppedGroup, StepAssembled, StepTrained
from schemas.payload import inline_ref, run_ref
from schemas.topics import TOPICS

TOPIC_OF = {topic.message: topic for topic in TOPICS}
MANIFEST = run_ref(b"manifest")
Log = list[tuple[str, bytes]]


def _said(message: msgspec.Struct) -> tuple[str, bytes]:
    topic = TOPIC_OF[type(message)]
    return topic.subject("r", message), topic.encode(message)


def _episode(group: str, slot: int) -> list[msgspec.Struct]:
    session = f"s{group}{slot}"
    where = {"group": group, "slot": slot, "attempt": 0, "stream": "s", "data_id": "d"}
    row = Row(row=f"{group}/{slot}/0", tokens=run_ref(session.encode()), num_tokens=2, num_loss_tokens=1, min_version=0, max_version=0, reward=1.0)  # fmt: skip
    call = InteractionRecorded(session=session, ordinal=0, interaction_id=f"call-{session}", parent=None, tokens=inline_ref(b""), num_context=0, num_prompt=1, num_completion=1, min_version=0, max_version=0, finish_reason=FinishReason.STOP)  # fmt: skip
    return [
        EpisodeRequested(**where),
        call,
        SessionClosed(session=session, num_interactions=1),
        EpisodeEnded(**where, session=session, outcome=EpisodeClass.SCORED, final=True, status="DONE"),
        Trajectory(**where, session=session, outcome=EpisodeClass.SCORED, rejected=False, rows=[row]),
    ]


def _log() -> list[msgspec.Struct]:
    messages: list[msgspec.Struct] = []
    for group in ("g0", "g1", "g2"):
        messages.append(GroupIssued(group=group, ordinal=0, stream="s", data_id="d", num_slots=2))
        for slot in range(2):
            messages += _episode(group, slot)
        messages.append(GroupClosed(group=group, stream="s", usable=True, num_slots=2, num_usable=2))
    dropped = DroppedGroup(group="g1", stream="s", reason="stale")
    step = StepAssembled(step=1, manifest=MANIFEST, groups=["g0"], dropped=[dropped], num_rows=2, num_tokens=4, num_mini_batches=1, min_version=0, mean_reward=1.0)  # fmt: skip
    return [*messages, step, StepTrained(step=1, generation=1, digest="w", manifest_id=MANIFEST.id)]


def _close(log: Log, answered: tuple[str, ...] = ()) -> Findings:
    ledger = Ledger(groups_per_step=2, max_staleness=1)
    for subject, data in log:
        ledger.take(subject, data)
    return ledger.close(answered=answered)


def _without(kind: type[msgspec.Struct]) -> Log:
    """The log without the first message of a kind."""
    messages = _log()
    messages.remove(next(message for message in messages if isinstance(message, kind)))
    return [_said(message) for message in messages]


def _with(*more: msgspec.Struct) -> Log:
    return [_said(message) for message in [*_log(), *more]]


def test_a_log_in_order_gives_no_finding() -> None:
    found = _close(_with(), answered=("call-sg00", "call-sg21"))
    assert found == Findings()


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (EpisodeRequested, "slot g0/0 was never asked for"),
        (Trajectory, "slot g0/0 has 0 results"),
        (GroupClosed, "group g0 was never closed"),
        (InteractionRecorded, "session sg00 closed with 1 calls, recorded are []"),
        (StepTrained, "step 1 was assembled and never trained"),
    ],
)
def test_what_is_missing_is_lost(kind: type[msgspec.Struct], text: str) -> None:
    assert text in _close(_without(kind)).lost


@pytest.mark.parametrize(("error", "num_lost"), [("the log did not confirm an interaction within 30 s", 0), ("", 1)])
def test_only_a_failed_session_may_have_a_call_in_doubt(error: str, num_lost: int) -> None:
    log = [
        _said(msgspec.structs.replace(message, num_interactions=0, system_error=error))
        if isinstance(message, SessionClosed) and message.session == "sg00"
        else _said(message)
        for message in _log()
    ]
    assert len(_close(log).lost) == num_lost


def test_an_answered_call_that_is_not_on_the_log_is_lost() -> None:
    assert _close(_with(), answered=("call-x",)).lost == ["call call-x was answered and is not on the log"]


def _second(subject: str) -> Callable[[], Log]:
    return lambda: [*_with(), next(entry for entry in _with() if entry[0] == subject)]


def _step(step: int, **changes: object) -> StepAssembled:
    values = {"manifest": MANIFEST, "groups": ["g0"], "num_rows": 2, "num_tokens": 4, "num_mini_batches": 1, "min_version": step - 1, "mean_reward": 1.0}  # fmt: skip
    return msgspec.convert({"step": step, **values, **changes}, StepAssembled, from_attributes=True)


@pytest.mark.parametrize(
    ("log", "text"),
    [
        (_second("hr.r.trajectory.ready.g0.0"), "hr.r.trajectory.ready.g0.0 stands twice"),
        (lambda: _with(_step(2)), "group g0 ended 2 times: steps [1, 2]"),
        (lambda: _with(_step(2, groups=["g1"])), "group g1 ended 2 times: steps [2]"),
    ],
)
def test_what_ends_twice_is_doubled(log: Callable[[], Log], text: str) -> None:
    assert text in _close(log()).doubled


def test_a_row_in_two_steps_is_doubled_and_one_of_nobody_is_unexplained() -> None:
    ledger = Ledger(groups_per_step=2, max_staleness=1)
    for subject, data in _with():
        ledger.take(subject, data)
    tokens = ledger.row_tokens["g0/0/0"]["id"]
    manifest = {
        "row_ids": ["g0/0/0", "g0/7/0"],
        "groups": ["g0"],
        "row_group": msgspec.msgpack.decode(msgspec.msgpack.encode(int32([0, 0]))),
        "payload_ids": [tokens, tokens],
    }
    seen: dict[str, int] = {}
    ledger.check_rows(1, manifest, seen)
    assert ledger.findings.unexplained == ["row g0/7/0 of step 1 comes from no result of group g0"]
    ledger.check_rows(2, manifest, seen)
    assert "row g0/0/0 is in step 1 and in step 2" in ledger.findings.doubled


def test_a_stale_step_a_dead_letter_and_waiting_groups_that_would_make_a_step_are_unexplained() -> None:
    letter = DeadLetter(stage="s", sequence=1, subject="x", reason="undecodable", error="e", attempts=1, data=b"")
    stale = _step(2, groups=["g2"], min_version=-1)
    assert _close(_with(letter, stale)).unexplained == [
        "dead letter of s: x: undecodable: e",
        "step 2 is 2 versions stale, allowed 1",
    ]
    messages = [message for message in _log() if not isinstance(message, StepAssembled | StepTrained)]
    found = _close([_said(message) for message in messages])
    assert len([line for line in found.unexplained if "is closed, usable and in no step" in line]) == 3
