"""A recorder goes on for as long as a run does: what it keeps in memory does not grow with the file."""

from __future__ import annotations

import tracemalloc

import pytest

from broker.api import Record
from broker.recording import Recording, RecordingWriter, new_header
from schemas.payload import run_ref

HEADER = new_header("r", headrace_version="0.1.0", redactions=[], weights="first")
SESSIONS = 20


def _write_blocks(writer: RecordingWriter, first: int, count: int) -> None:
    """Blocks with as many sessions as messages: an index entry of each is as large as it gets."""
    for block in range(first, first + count):
        writer.write_messages(
            [
                Record(
                    subject=f"hr.r.session.closed.g{block:07d}-{number}-0-0",
                    sequence=block * SESSIONS + number + 1,
                    data=b"x",
                    unix_time_s=float(block),
                )
                for number in range(SESSIONS)
            ]
        )


def test_a_writer_keeps_a_few_bytes_a_block_and_closes_without_holding_the_index(tmp_path) -> None:
    writer = RecordingWriter.open(tmp_path / "a.hrrec", HEADER)
    _write_blocks(writer, 0, 200)
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        _write_blocks(writer, 200, 1500)
        grown = tracemalloc.get_traced_memory()[0] - before
        tracemalloc.reset_peak()
        writer.close()
        peak = tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
    assert grown < 1500 * 64
    assert peak < 4 * 2**20
    with Recording(tmp_path / "a.hrrec") as recording:
        assert recording.complete
        assert recording.verify() == []
        assert recording.num_messages == 1700 * SESSIONS
        assert [record.sequence for record in recording.records_of_group("g0001234")] == [
            1234 * SESSIONS + number + 1 for number in range(SESSIONS)
        ]


def test_a_file_that_is_gone_on_with_has_an_index_of_all_its_blocks(tmp_path) -> None:
    for start in (0, 5, 10):
        writer = RecordingWriter.open(tmp_path / "a.hrrec", HEADER)
        writer.write_payloads([(run_ref(b"%d" % start).id, b"%d" % start)])
        _write_blocks(writer, start, 5)
        writer.close()
    with Recording(tmp_path / "a.hrrec") as recording:
        assert recording.complete
        assert recording.num_messages == 15 * SESSIONS
        assert len(list(recording.records_of_group("g0000007"))) == SESSIONS
        assert bytes(recording.payload(run_ref(b"5"))) == b"5"


@pytest.mark.parametrize("damage", ["not closed", "index damaged"])
def test_keys_are_found_in_a_file_without_a_sound_index(tmp_path, damage: str) -> None:
    path = tmp_path / "a.hrrec"
    writer = RecordingWriter.open(path, HEADER)
    _write_blocks(writer, 0, 5)
    if damage == "index damaged":
        end = writer.size_bytes
        writer.close()
        data = bytearray(path.read_bytes())
        data[end + 60] ^= 1
        path.write_bytes(data)
    with Recording(path) as recording:
        assert not recording.complete
        assert len(list(recording.records_of_group("g0000003"))) == SESSIONS


def test_a_payload_that_was_forgotten_is_written_again_and_read_the_same(tmp_path) -> None:
    writer = RecordingWriter.open(tmp_path / "a.hrrec", HEADER, ids_remembered=2)
    payloads = [(run_ref(data).id, data) for data in (b"one", b"two", b"three")]
    for payload in [*payloads, *payloads]:
        writer.write_payloads([payload])
    assert not writer.holds(payloads[0][0])
    assert writer.holds(payloads[2][0])
    writer.close()
    with Recording(tmp_path / "a.hrrec") as recording:
        assert recording.verify() == []
        assert [bytes(recording.payload(run_ref(data))) for _, data in payloads] == [b"one", b"two", b"three"]
