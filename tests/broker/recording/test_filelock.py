"""One writer a recording, and its lock ends with it."""

import subprocess
import sys
from pathlib import Path

import pytest

from broker.api import Record
from broker.recording import Recording, RecordingInUseError, RecordingWriter, WrongRunError, new_header

ROOT = Path(__file__).parents[3]

WRITER = """
import sys
from pathlib import Path
from broker.api import Record
from broker.recording import RecordingWriter, new_header
header = new_header("r", headrace_version="0", redactions=[], weights="first")
writer = RecordingWriter.open(Path(sys.argv[1]), header)
writer.write_messages([Record(subject="hr.r.a.b.1", sequence=1, data=b"x", unix_time_s=1.0)])
print("written", flush=True)
sys.stdin.read()
"""


def opened(path, **options):
    header = new_header("r", headrace_version="0", redactions=[], weights="first")
    return RecordingWriter.open(path, header, **options)


def test_a_second_writer_is_refused_until_the_first_is_closed(tmp_path):
    path = tmp_path / "a.hrrec"
    first = opened(path)
    with pytest.raises(RecordingInUseError, match=r"a\.hrrec: another process records into it.*another file"):
        opened(path)
    first.close()
    opened(path).close()


def test_a_new_file_is_locked_from_the_first_byte_on_and_can_be_read(tmp_path):
    path = tmp_path / "a.hrrec"
    first = opened(path)
    before = path.read_bytes()
    with pytest.raises(RecordingInUseError):
        opened(path)
    assert path.read_bytes() == before
    with Recording(path) as recording:
        assert recording.num_messages == 0
    first.close()


def test_a_rotated_recording_stays_locked(tmp_path):
    path = tmp_path / "a.hrrec"
    first = opened(path, rotate_bytes=1)
    first.write_messages([Record(subject="hr.r.a.b.1", sequence=1, data=b"x", unix_time_s=1.0)])
    assert (tmp_path / "a.0001.hrrec").exists()
    with pytest.raises(RecordingInUseError):
        opened(path)
    first.close()
    opened(path).close()


def test_a_killed_writer_leaves_no_lock(tmp_path):
    path = tmp_path / "a.hrrec"
    command = [sys.executable, "-c", WRITER, str(path)]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"written\n"
        with pytest.raises(RecordingInUseError):
            opened(path)
        process.kill()
        process.wait()
    writer = opened(path)
    assert writer.last_sequence == 1
    writer.close()


def test_what_can_not_be_gone_on_with_is_not_left_locked(tmp_path):
    path = tmp_path / "a.hrrec"
    opened(path).close()
    other = new_header("other", headrace_version="0", redactions=[], weights="first")
    for _ in range(2):
        with pytest.raises(WrongRunError, match="holds a recording of run 'r'"):
            RecordingWriter.open(path, other)
    opened(path).close()
