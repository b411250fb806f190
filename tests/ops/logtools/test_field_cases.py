"""Reported faults of replay and config that the log's tools must not have; test_stage_diffs.py holds the rest of replay."""

import msgspec
import pytest

from broker.api import Record
from broker.recording import Recording, RecordingWriter, new_header
from ops.logtools.patterns import parse_pattern
from ops.logtools.sources import tell
from ops.logtools.stage_diffs import diff_stage
from schemas.errors import InvalidIdError, NonFiniteError
from schemas.ids import decode_token, encode_token
from schemas.messages.rollout import EpisodeClass, Trajectory
from schemas.topics import GROUP_ISSUED, TRAJECTORY_READY


def told(subject, value):
    return tell(Record(subject=subject, sequence=1, data=msgspec.msgpack.encode(value), unix_time_s=0.0))


def test_a_log_written_before_a_field_was_added_is_read_with_its_default():
    old = {"group": "g0000001", "ordinal": 1, "stream": "s", "data_id": "d", "num_slots": 2}
    assert told("hr.r.group.issued.g0000001", old).message.min_version == 0


def test_a_newer_writers_extra_field_is_ignored():
    newer = {"group": "g0000001", "ordinal": 1, "stream": "s", "data_id": "d", "num_slots": 2, "extra": 1}
    assert told("hr.r.group.issued.g0000001", newer).message.num_slots == 2


def test_a_foreign_message_is_never_taken_for_another_type():
    foreign = told("hr.r.group.issued.g0000001", {"a": 4})
    assert foreign.message is None
    assert "expected a GroupIssued" in foreign.error
    unknown = told("hr.r.group.vanished.g0000001", {"group": "g0000001"})
    assert unknown.topic is None
    assert "hr.r.group.vanished.g0000001" in unknown.error


def test_each_recording_carries_a_schema_version(tmp_path):
    writer = RecordingWriter.open(
        tmp_path / "a.hrrec", new_header("r", headrace_version="0", redactions=[], weights="first")
    )
    writer.close()
    with Recording(tmp_path / "a.hrrec") as recording:
        assert recording.header.schema_version >= 1
        assert recording.header.topics[GROUP_ISSUED.name].message == "GroupIssued"


@pytest.mark.parametrize("reward", [float("nan"), float("inf")])
def test_a_number_that_json_can_not_carry_never_reaches_a_log(reward):
    message = Trajectory(
        group="g", slot=0, attempt=0, session="", stream="s", data_id="d", outcome=EpisodeClass.SCORED, rejected=False,
        reward=reward,
    )  # fmt: skip
    with pytest.raises(NonFiniteError, match=r"Trajectory\.reward"):
        TRAJECTORY_READY.encode(message)


@pytest.mark.parametrize("pattern", ["episode.en*.>", "episode.>.done"])
def test_a_star_inside_a_token_is_refused(pattern):
    with pytest.raises(InvalidIdError):
        parse_pattern(pattern, "r")


@pytest.mark.parametrize("identity", ["run.7", "run 7", "run*", "rün"])
def test_ids_become_one_token_and_come_back(identity):
    assert "." not in encode_token(identity)
    assert decode_token(encode_token(identity)) == identity


async def test_relax_171_the_same_log_gives_equal_ids_masks_rewards_and_weights_without_a_server(recording):
    """redai-studio/Relax#171; swapped arrivals and a cut log are in test_stage_diffs.py."""
    for stage in ("reward", "assembly", "training"):
        report = await diff_stage(recording, stage)
        assert report.compared > 0
        assert report.changed == []
