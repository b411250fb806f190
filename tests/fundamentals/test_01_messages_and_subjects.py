"""Chapter 1: what is said, and under which name.

Everything that happens in a run is a message. A message is a frozen struct without behaviour, it belongs to exactly one
topic, and its own ids say on which subject it stands. So whoever knows a group's name can ask the log for all that was
ever said about it.
"""

from __future__ import annotations

import msgspec
import pytest

from schemas.errors import DecodeError, NonFiniteError
from schemas.messages.rollout import EpisodeClass, Trajectory
from schemas.messages.sampling import GroupIssued
from schemas.subjects import matches, split_subject
from schemas.topics import GROUP_ISSUED, TRAJECTORY_READY

ISSUED = GroupIssued(group="g0000012", ordinal=12, stream="words", data_id="d7", num_slots=4)


def test_the_subject_is_made_of_the_messages_own_ids() -> None:
    """`hr.<run>.<topic>.<key>`: who says it again says it on the same subject."""
    assert GROUP_ISSUED.subject("demo", ISSUED) == "hr.demo.group.issued.g0000012"
    parts = split_subject("hr.demo.group.issued.g0000012")
    assert (parts.run, parts.topic, parts.key) == ("demo", "group.issued", ("g0000012",))


def test_a_pattern_names_many_subjects_at_once() -> None:
    """`*` is one token, `>` the rest: this is how a stage says what it wants to hear."""
    assert GROUP_ISSUED.filter("demo") == "hr.demo.group.issued.>"
    assert matches("hr.demo.*.issued.>", GROUP_ISSUED.subject("demo", ISSUED))
    assert not matches(GROUP_ISSUED.filter("demo"), GROUP_ISSUED.subject("other", ISSUED))


def test_a_message_comes_back_as_it_went() -> None:
    """On the wire it is msgpack, decoded in one pass into the struct that the topic allows."""
    assert GROUP_ISSUED.decode(GROUP_ISSUED.encode(ISSUED)) == ISSUED


def test_nobody_changes_a_message() -> None:
    """What was said was said; a new fact is a new message."""
    with pytest.raises(AttributeError):
        ISSUED.num_slots = 8  # pyright: ignore[reportAttributeAccessIssue] - that is the point


def test_a_newer_writers_fields_are_no_trouble_and_another_message_is() -> None:
    """Fields are only ever added, with a default. Bytes that are no such message are refused by name."""
    newer = msgspec.msgpack.encode({**msgspec.to_builtins(ISSUED), "mood": "hopeful"})
    assert GROUP_ISSUED.decode(newer) == ISSUED
    with pytest.raises(DecodeError, match=r"expected a GroupIssued on 'group\.issued'"):
        GROUP_ISSUED.decode(b"\x93\x01\x02\x03")


def test_a_number_that_is_none_never_enters_the_log() -> None:
    """A reward that is NaN would poison every mean after it, so it stops where it arises."""
    nan = Trajectory(
        group="g0000012",
        slot=0,
        attempt=0,
        session="s",
        stream="words",
        data_id="d7",
        outcome=EpisodeClass.SCORED,
        rejected=False,
        reward=float("nan"),
    )
    with pytest.raises(NonFiniteError, match=r"Trajectory\.reward"):
        TRAJECTORY_READY.encode(nan)
