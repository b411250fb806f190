import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from broker.api import Record
from broker.errors import PayloadMissingError
from broker.recording import (
    NewerRecordingError,
    NotARecordingError,
    Recording,
    RecordingWriter,
    WrongRunError,
    new_header,
)
from broker.recording.frames import PRELUDE_BYTES, Kind, places
from schemas.json_schema import SCHEMA_VERSION
from schemas.payload import run_ref
from schemas.topics import TOPICS


def header(run="r", redactions=()):
    return new_header(run, headrace_version="0.1.0", redactions=list(redactions), weights="first")


def records(count, first=1, group_size=4):
    return [
        Record(
            subject=f"hr.r.episode.ended.g{number // group_size:07d}.{number % group_size}.0",
            sequence=number,
            data=b"%d" % number * 20,
            unix_time_s=1000.0 + number,
            headers={"Odd": "yes"} if number % 2 else {},
        )
        for number in range(first, first + count)
    ]


def written(path, count=100, block=10, *, close=True, payloads=(), **options):
    writer = RecordingWriter.open(path, header(), **options)
    writer.write_payloads([(run_ref(data).id, data) for data in payloads])
    everything = records(count)
    for start in range(0, count, block):
        writer.write_messages(everything[start : start + block])
    if close:
        writer.close()
    return everything


def test_what_was_written_is_read(tmp_path):
    everything = written(tmp_path / "a.hrrec")
    with Recording(tmp_path / "a.hrrec") as recording:
        assert list(recording.records()) == everything
        assert recording.complete
        assert recording.run == "r"


def test_a_recording_says_how_its_messages_are_built(tmp_path):
    written(tmp_path / "a.hrrec", 1)
    with Recording(tmp_path / "a.hrrec") as recording:
        assert recording.header.schema_version == SCHEMA_VERSION
        assert set(recording.header.topics) == {topic.name for topic in TOPICS}
        schema = msgspec.json.decode(recording.header.topics["group.issued"].json_schema)
        assert "num_slots" in schema["$defs"]["GroupIssued"]["properties"]


def test_reading_from_a_sequence_a_time_and_a_subject(tmp_path):
    everything = written(tmp_path / "a.hrrec")
    with Recording(tmp_path / "a.hrrec") as recording:
        assert list(recording.records(after_sequence=37, to_sequence=41)) == everything[37:41]
        assert list(recording.records(from_time_s=1050.0, to_time_s=1053.0)) == everything[49:52]
        one = "hr.r.episode.ended.g0000005.1.0"
        assert [record.subject for record in recording.records([one])] == [one]
        assert [record.sequence for record in recording.records(["hr.r.episode.*.g0000005.>"])] == [20, 21, 22, 23]
        assert list(recording.records(["hr.r.group.>"])) == []


def test_a_group_is_found_with_everything_that_is_named_after_it(tmp_path):
    writer = RecordingWriter.open(tmp_path / "a.hrrec", header())
    subjects = [
        "group.issued.g0000001",
        "session.closed.g0000001-0-0-0",
        "session.closed.g0000010-0-0-0",
        "step.trained.1.1",
    ]
    writer.write_messages(
        [
            Record(subject=f"hr.r.{subject}", sequence=number, data=b"x", unix_time_s=1.0)
            for number, subject in enumerate(subjects, start=1)
        ]
    )
    writer.close()
    with Recording(tmp_path / "a.hrrec") as recording:
        assert [record.sequence for record in recording.records_of_group("g0000001")] == [1, 2]


def test_a_step_is_found_by_its_number(tmp_path):
    writer = RecordingWriter.open(tmp_path / "a.hrrec", header())
    subjects = [
        "a.b.x",
        "step.assembled.1",
        "a.b.y",
        "step.trained.1.1",
        "weights.published.1.1",
        "step.assembled.2",
        "a.b.z",
    ]
    writer.write_messages(
        [
            Record(subject=f"hr.r.{subject}", sequence=number, data=b"x", unix_time_s=1.0)
            for number, subject in enumerate(subjects, start=1)
        ]
    )
    writer.close()
    with Recording(tmp_path / "a.hrrec") as recording:
        assert recording.first_sequence_of_step(1) == 1
        assert recording.first_sequence_of_step(2) == 3
        assert recording.last_sequence_of_step(1) == 5


def test_payloads_are_found_by_their_content(tmp_path):
    payloads = [b"small", b"", b"large" * 500_000]
    written(tmp_path / "a.hrrec", payloads=[*payloads, b"small"])
    with Recording(tmp_path / "a.hrrec") as recording:
        assert [bytes(recording.payload(run_ref(data))) for data in payloads] == payloads
        assert recording.num_payloads == 3
        with pytest.raises(PayloadMissingError, match="is not in"):
            recording.payload(run_ref(b"another"))


@settings(max_examples=60, deadline=None)
@given(cut=st.integers(0, 10_000))
def test_whatever_is_left_of_a_torn_file_is_read(cut, tmp_path_factory):
    path = tmp_path_factory.mktemp("torn") / "a.hrrec"
    everything = written(path, 60, close=False, payloads=[b"p" * 1000])
    whole = path.read_bytes()
    with path.open("rb") as file:
        found = [place for place in places(file, "", []) if place.kind == Kind.MESSAGES]
        header_end = next(places(file, "", [])).end
    size = header_end + cut % (len(whole) - header_end + 1)
    path.write_bytes(whole[:size])
    blocks = sum(place.end <= size for place in found)
    with Recording(path) as recording:
        assert list(recording.records()) == everything[: blocks * 10]
        assert not recording.complete


def test_a_file_that_ends_before_its_header_is_no_recording(tmp_path):
    path = tmp_path / "a.hrrec"
    written(path, 1)
    whole = path.read_bytes()
    for size in (0, 5, PRELUDE_BYTES, PRELUDE_BYTES + 40):
        path.write_bytes(whole[:size])
        with pytest.raises(NotARecordingError, match=r"a\.hrrec"):
            Recording(path)


def test_appending_to_a_torn_file_cuts_the_tail_and_goes_on(tmp_path):
    path = tmp_path / "a.hrrec"
    everything = written(path, 60, close=False)
    path.write_bytes(path.read_bytes()[:-7])
    writer = RecordingWriter.open(path, header())
    assert writer.last_sequence == 50
    writer.write_messages(records(60)[40:])
    writer.close()
    with Recording(path) as recording:
        assert list(recording.records()) == everything
        assert recording.complete
        assert recording.damages == []


def test_a_closed_recording_is_gone_on_with(tmp_path):
    path = tmp_path / "a.hrrec"
    written(path, 20, payloads=[b"one"])
    writer = RecordingWriter.open(path, header())
    assert writer.holds(run_ref(b"one").id)
    writer.write_messages(records(10, first=21))
    writer.close()
    with Recording(path) as recording:
        assert [record.sequence for record in recording.records()] == list(range(1, 31))


def test_a_damaged_block_is_named_and_the_others_are_read(tmp_path):
    path = tmp_path / "a.hrrec"
    written(path, 60)
    with path.open("rb") as file:
        broken = [place for place in places(file, "", []) if place.kind == Kind.MESSAGES][2]
    data = bytearray(path.read_bytes())
    data[broken.end - 3] ^= 0xFF
    path.write_bytes(data)
    with Recording(path) as recording:
        assert [record.sequence for record in recording.records()] == [*range(1, 21), *range(31, 61)]
        assert "checksum" in recording.verify()[0].reason
        assert recording.damages[0].offset == broken.offset


def test_bytes_overwritten_between_blocks_are_stepped_over(tmp_path):
    path = tmp_path / "a.hrrec"
    written(path, 60, close=False)
    with path.open("rb") as file:
        broken = [place for place in places(file, "", []) if place.kind == Kind.MESSAGES][2]
    data = bytearray(path.read_bytes())
    data[broken.offset : broken.offset + 20] = bytes(20)
    path.write_bytes(data)
    with Recording(path) as recording:
        assert [record.sequence for record in recording.records()] == [*range(1, 21), *range(31, 61)]
        assert recording.damages[0].reason == "damaged bytes between two frames"
        assert [(gap.after_sequence, gap.before_sequence) for gap in recording.gaps()] == [(20, 31)]


def test_a_recording_rotates_and_is_read_as_one(tmp_path):
    path = tmp_path / "a.hrrec"
    everything = written(path, 200, rotate_bytes=1, payloads=[b"first part"])
    assert len(list(tmp_path.glob("a*.hrrec"))) == 21
    with Recording(path) as recording:
        assert list(recording.records()) == everything
        assert bytes(recording.payload(run_ref(b"first part"))) == b"first part"
    writer = RecordingWriter.open(path, header(), rotate_bytes=1)
    assert writer.last_sequence == 200


def test_a_rotation_that_a_crash_cut_short_is_mended(tmp_path):
    path = tmp_path / "a.hrrec"
    written(path, 20)
    (tmp_path / "a.0001.hrrec").write_bytes(b"\x93HRREC")
    writer = RecordingWriter.open(path, header())
    writer.write_messages(records(5, first=21))
    writer.close()
    with Recording(path) as recording:
        assert recording.num_messages == 25


def test_a_newer_format_is_refused_by_its_number(tmp_path):
    path = tmp_path / "a.hrrec"
    written(path, 1)
    data = bytearray(path.read_bytes())
    data[8] = 9
    path.write_bytes(data)
    with pytest.raises(NewerRecordingError, match="format 9; this version reads formats up to 1"):
        Recording(path)


def test_another_kind_of_file_is_refused(tmp_path):
    (tmp_path / "a.hrrec").write_bytes(b"PK\x03\x04" * 20)
    with pytest.raises(NotARecordingError, match="expected a headrace recording"):
        Recording(tmp_path / "a.hrrec")


def test_another_run_is_not_appended(tmp_path):
    written(tmp_path / "a.hrrec", 1)
    with pytest.raises(WrongRunError, match="holds a recording of run 'r'"):
        RecordingWriter.open(tmp_path / "a.hrrec", header(run="other"))
    with pytest.raises(WrongRunError, match="redaction rules"):
        RecordingWriter.open(tmp_path / "a.hrrec", header(redactions=["secrets"]))


def test_gaps_are_named(tmp_path):
    writer = RecordingWriter.open(tmp_path / "a.hrrec", header())
    some = records(30)
    writer.write_messages(some[4:8])
    writer.write_messages([*some[8:12], *some[14:16]])
    writer.close()
    with Recording(tmp_path / "a.hrrec") as recording:
        assert [(gap.after_sequence, gap.before_sequence) for gap in recording.gaps()] == [(0, 5), (12, 15)]
        assert [gap.num_missing for gap in recording.gaps()] == [4, 2]
