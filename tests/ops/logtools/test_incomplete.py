"""A recording that is damaged or cut off: every reader does what can be done, says what is missing, and ends with code 3."""

import json

import numpy as np
import pytest

from broker.recording import Recording, RecordingWriter, new_header
from schemas.payload import PayloadRef

BLOCK = 40


@pytest.fixture(scope="module")
def blocks(recorded, tmp_path_factory):
    """The recording in blocks of 40 messages."""
    path = tmp_path_factory.mktemp("blocks") / "run.hrrec"
    writer = RecordingWriter.open(path, new_header("r", headrace_version="0", redactions=[], weights="first"))
    with Recording(recorded) as recording:
        for _, entry in recording.lookup.payloads:
            ids = [entry.head.ids[start : start + 16].hex() for start in range(0, len(entry.head.ids), 16)]
            sizes = np.frombuffer(entry.head.sizes, dtype=np.int64).tolist()
            refs = [PayloadRef(store="run", id=i, size_bytes=size) for i, size in zip(ids, sizes, strict=True)]
            writer.write_payloads([(ref.id, recording.payload(ref)) for ref in refs])
        records = list(recording.records())
    for start in range(0, len(records), BLOCK):
        writer.write_messages(records[start : start + BLOCK])
    writer.close()
    return path


def flipped(blocks, path, number):
    """A copy with one byte changed in its message block `number`."""
    data = bytearray(blocks.read_bytes())
    with Recording(blocks) as recording:
        data[recording.lookup.messages[number][1].place.end - 1] ^= 0xFF
    path.write_bytes(data)
    return path


@pytest.fixture
def damaged(blocks, tmp_path):
    return flipped(blocks, tmp_path / "flipped.hrrec", 4)


def cut_off(blocks, path, number):
    """A copy that ends inside its message block `number`."""
    with Recording(blocks) as recording:
        path.write_bytes(blocks.read_bytes()[: recording.lookup.messages[number][1].place.offset + 30])
    return path


@pytest.fixture
def beginning_missing(recorded, tmp_path):
    path = tmp_path / "late.hrrec"
    writer = RecordingWriter.open(path, new_header("r", headrace_version="0", redactions=[], weights="first"))
    with Recording(recorded) as recording:
        writer.write_messages(list(recording.records(after_sequence=30)))
    writer.close()
    return path


SEQUENCES = f"sequences {4 * BLOCK + 1} to {5 * BLOCK} are not read"


def test_inspect_finds_damage_and_says_so_in_its_json(headrace, damaged):
    code, out, err = headrace("inspect", damaged, "--json")
    assert code == 3
    assert SEQUENCES in json.loads(out)["damages"][0]
    assert SEQUENCES in err


def test_an_episode_of_a_damaged_recording_is_shown_with_what_is_missing(headrace, damaged):
    with Recording(damaged) as recording:
        number = recording.lookup.messages[4][1].head.first_sequence
        groups = {r.subject.split(".")[4][:8] for r in recording.records(["hr.r.episode.>"], to_sequence=number)}
    code, out, err = headrace("inspect", damaged, max(groups), "--json")
    found = json.loads(out)
    assert code == 3
    assert found["episodes"]
    assert SEQUENCES in found["damages"][0]
    assert SEQUENCES in err


def test_why_of_a_damaged_recording(headrace, damaged):
    code, out, err = headrace("why", "g2", "--in", damaged, "--json")
    assert code == 3
    assert SEQUENCES in json.loads(out)["damages"][0]
    assert SEQUENCES in err


def test_dead_letters_and_report_of_a_damaged_recording_say_so_in_their_json(headrace, blocks, tmp_path):
    with Recording(blocks) as recording:
        letters = [record.sequence for record in recording.records(["hr.r.dead.>"])]
    number = (letters[0] - 1) // BLOCK  # a command meets what is damaged among the messages that it reads
    unread = f"sequences {number * BLOCK + 1} to {(number + 1) * BLOCK} are not read"
    damaged = flipped(blocks, tmp_path / "letters.hrrec", number)
    code, out, err = headrace("dead", "list", "--in", damaged, "--all", "--json")
    found = json.loads(out)
    assert (code, len(found["letters"]) < len(letters), unread in err) == (3, True, True)
    assert unread in found["damages"][0]
    for arguments in (("dead", "show", found["letters"][0]["id"], "--in", damaged), ("report", damaged)):
        code, out, err = headrace(*arguments, "--json")
        shown = json.loads(out)
        assert (code, shown["damages"], unread in err) == (3, found["damages"], True)


def test_dead_letters_and_report_tell_gaps_in_their_json(headrace, beginning_missing):
    for arguments in (("dead", "list", "--all", "--in", beginning_missing), ("report", beginning_missing)):
        code, out, _ = headrace(*arguments, "--json")
        assert (code, json.loads(out)["gaps"], json.loads(out)["damages"]) == (3, [[1, 30]], [])


@pytest.fixture
def export(headrace, tmp_path):
    """Exports a recording into a folder of its own: exit code, the JSON, stderr."""
    pytest.importorskip("pyarrow")

    def exported(recording):
        code, out, err = headrace("export", recording, tmp_path / f"tables-of-{recording.stem}", "--json")
        return code, json.loads(out), err

    return exported


def test_export_writes_what_can_be_read(export, damaged, recorded):
    _, whole, _ = export(recorded)
    code, found, err = export(damaged)
    assert code == 3
    assert 0 < found["interactions"] < whole["interactions"]
    assert SEQUENCES in found["damages"][0]
    assert SEQUENCES in err
    assert (whole["damages"], whole["gaps"], whole["problems"]) == ([], [], [])


def test_a_manifest_that_can_not_be_read_leaves_the_other_tables(export, recorded, beginning_missing):
    """That file holds no payloads at all."""
    _, whole, _ = export(recorded)
    code, found, err = export(beginning_missing)
    assert code == 3
    assert (found["steps"], found["rows"]) == (whole["steps"], 0)
    assert "step 1 has no rows, its manifest can't be read" in " ".join(found["problems"])
    assert "interactions have no tokens" in err


def test_a_replay_publishes_what_can_be_read(headrace, damaged, tmp_path):
    with Recording(damaged) as recording:
        total = recording.num_messages
    code, out, err = headrace("replay", damaged, "--into", tmp_path / "again", "--json")
    found = json.loads(out)
    assert code == 3
    assert found["published"] == total - BLOCK
    assert SEQUENCES in found["damages"][0]
    assert SEQUENCES in err


@pytest.mark.parametrize("stage", ["reward", "assembly", "training"])
def test_a_diff_that_compared_nothing_is_no_success(headrace, blocks, tmp_path, stage):
    cut = cut_off(blocks, tmp_path / "cut.hrrec", 1)
    code, out, err = headrace("replay", cut, "--stage", stage, "--diff", "--json")
    found = json.loads(out)
    assert (code, found["compared"]) == (1, 0)
    assert f"up to sequence {BLOCK} the recording holds 0 " in found["nothing"]
    assert "torn tail" in found["damages"][0]
    assert "torn tail" in err
    assert "nothing was compared: " in headrace("replay", cut, "--stage", stage, "--diff")[1]


def test_a_diff_without_differences_on_a_cut_off_recording_ends_with_3(headrace, blocks, tmp_path):
    cut = cut_off(blocks, tmp_path / "cut.hrrec", 2)
    code, out, err = headrace("replay", cut, "--stage", "reward", "--diff", "--json")
    found = json.loads(out)
    assert (code, found["differences"], found["nothing"]) == (3, 0, "")
    assert found["compared"] > 0
    assert "torn tail" in err


def test_what_is_not_in_a_recording_is_told(headrace, beginning_missing):
    code, out, err = headrace("inspect", beginning_missing, "--json")
    assert code == 3
    assert json.loads(out)["gaps"] == [[1, 30]]
    assert "not in the recording: sequences 1 to 30 (30 messages)" in err


def test_a_lost_part_is_damage(headrace, recorded, tmp_path):
    path = tmp_path / "a.hrrec"
    header = new_header("r", headrace_version="0", redactions=[], weights="first")
    writer = RecordingWriter.open(path, header, rotate_bytes=1)
    with Recording(recorded) as recording:
        for start in range(0, 30, 10):
            writer.write_messages(list(recording.records(after_sequence=start, to_sequence=start + 10)))
    writer.close()
    (tmp_path / "a.0001.hrrec").unlink()
    code, _, err = headrace("inspect", path)
    assert code == 3
    assert "a.0001.hrrec: this part is not there, a.0002.hrrec and what follows it is not read" in err


def test_a_whole_recording_is_told_nothing_of(headrace, recorded):
    for arguments in (("inspect", recorded), ("why", "g2", "--in", recorded), ("dead", "list", "--in", recorded)):
        code, _, err = headrace(*arguments)
        assert (code, err) == (0, "")
