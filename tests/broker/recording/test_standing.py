"""A file is gone on with from the log it was made from, and from no other log of the same run id."""

import pytest

from broker.memory import MemoryBroker, MemoryServer
from broker.recording import (
    OtherLogError,
    Recorder,
    Recording,
    RecordingWriter,
    check_log,
    new_header,
    parse_rule,
)

RULE = "episode.ended.error=drop"


async def log_of(count, word=b"x", first=1, broker=None):
    broker = broker or MemoryBroker(MemoryServer(), "r")
    for number in range(first, first + count):
        data = b"the same" if number == 1 else word * number
        await broker.publish(f"hr.r.some.topic.{number}", data)
    return broker


async def record(broker, path, rules=()):
    header = new_header("r", headrace_version="0", redactions=list(rules), weights="first")
    writer = RecordingWriter.open(path, header)
    await Recorder(broker, writer, rules=[parse_rule(rule) for rule in rules]).run(follow=False)


async def test_the_log_that_was_recorded_is_gone_on_with(tmp_path):
    path = tmp_path / "a.hrrec"
    broker = await log_of(5)
    await check_log(broker, path)
    await record(broker, path)
    await check_log(broker, path)
    await check_log(await log_of(5, first=6, broker=broker), path)


async def test_a_log_that_ends_before_the_file_is_another_one(tmp_path):
    path = tmp_path / "a.hrrec"
    await record(await log_of(5), path)
    with pytest.raises(OtherLogError, match=r"up to sequence 5, the log of run 'r' ends at 3.*[Cc]hoose another file"):
        await check_log(await log_of(3), path)


async def test_a_longer_log_with_other_messages_is_another_one(tmp_path):
    path = tmp_path / "a.hrrec"
    await record(await log_of(5), path)
    before = path.read_bytes()
    with pytest.raises(OtherLogError, match=r"expected .* at sequence 2 as it was recorded, found another"):
        await check_log(await log_of(9, b"y"), path)
    assert path.read_bytes() == before


async def test_a_log_whose_subjects_differ_is_another_one(tmp_path):
    path = tmp_path / "a.hrrec"
    await record(await log_of(2), path)
    with pytest.raises(OtherLogError, match=r"hr\.r\.some\.topic\.1 at sequence 1, found hr\.r\.some\.topic\.7 there"):
        await check_log(await log_of(2, first=7), path)


async def test_where_the_end_was_purged_the_beginning_tells(tmp_path):
    path = tmp_path / "a.hrrec"
    broker = await log_of(200)
    await record(broker, path)
    for server in (broker, other := await log_of(200)):
        await log_of(3, first=201, broker=server)
        for number in range(2, 201):
            await server.purge_below(201, pattern=f"hr.r.some.topic.{number}")
    await check_log(broker, path)
    with pytest.raises(OtherLogError, match=r"hr\.r\.some\.topic\.1 at sequence 1"):
        await check_log(other, path)


async def test_a_log_that_was_purged_whole_can_not_be_told_from_another(tmp_path):
    path = tmp_path / "a.hrrec"
    broker = await log_of(3)
    await record(broker, path)
    await log_of(3, first=4, broker=broker)
    await broker.purge_below(5)
    await check_log(broker, path)


async def test_redacted_messages_are_told_by_their_times(tmp_path):
    path = tmp_path / "a.hrrec"
    broker = await log_of(5)
    await record(broker, path, [RULE])
    await check_log(broker, path)
    with pytest.raises(OtherLogError):
        await check_log(await log_of(5), path)


async def test_a_damaged_last_block_is_passed_over(tmp_path):
    path = tmp_path / "a.hrrec"
    broker = await log_of(5)
    await record(broker, path)
    end = path.stat().st_size
    await record(await log_of(5, first=6, broker=broker), path)
    data = bytearray(path.read_bytes())
    with Recording(path) as recording:
        place = recording.lookup.messages[-1][1].place
    assert place.offset < end
    data[place.end - 1] ^= 0xFF
    path.write_bytes(data)
    await check_log(broker, path)
    with pytest.raises(OtherLogError):
        await check_log(await log_of(10, b"y"), path)
