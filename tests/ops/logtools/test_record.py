"""A recorder asks that what it has not recorded stays on the log."""

from __future__ import annotations

import anyio
import msgspec
import pytest
from structlog.testing import capture_logs

from broker.connect import connect
from broker.memory import MemoryBroker, MemoryServer
from broker.recording import OtherLogError, RecorderSettings, Recording
from ops.logtools.record import record_run
from ops.running.recording import RunRecording, recorded
from pipeline.holds import HOLDS, MARK_KEY
from pipeline.log import RunLog
from schemas.messages.sampling import LogHold, Retain, Tick


async def _holds(broker) -> list[LogHold]:
    return [msgspec.msgpack.decode(data, type=LogHold) for data, _ in (await broker.list_state(HOLDS)).values()]


async def _tick(broker, ordinal: int) -> None:
    await RunLog(broker).publish(Tick(ordinal=ordinal, period_s=1.0, unix_time_s=0.0))


async def test_a_recorder_holds_what_is_not_in_its_file_and_releases_it_at_its_end(tmp_path, wait_until) -> None:
    stop = anyio.Event()
    async with connect("memory://", "r", memory=MemoryServer()) as broker:
        await _tick(broker, 1)

        async def moved() -> bool:
            return [hold.sequence for hold in await _holds(broker)] == [4]

        async with anyio.create_task_group() as tasks:
            settings = RecorderSettings(report_period_s=0.0, flush_after_s=0.01)
            tasks.start_soon(lambda: record_run(broker, tmp_path / "a.hrrec", settings, stop=stop))
            await _tick(broker, 2)
            await _tick(broker, 3)
            await wait_until(moved)
            assert "a.hrrec" in (await _holds(broker))[0].what
            stop.set()
        assert [hold.released for hold in await _holds(broker)] == [True]


async def test_messages_that_were_purged_before_are_told_and_are_a_gap_in_the_file(tmp_path) -> None:
    async with connect("memory://", "r", memory=MemoryServer()) as broker:
        for ordinal in range(1, 6):
            await _tick(broker, ordinal)
        await broker.save_state(MARK_KEY, msgspec.msgpack.encode(Retain(ordinal=0, sequence=4, held_by="the trainer")))
        await broker.purge_below(4)
        with capture_logs() as logs:
            await record_run(broker, tmp_path / "a.hrrec", follow=False)
    assert [entry["below"] for entry in logs if "purged" in entry["event"]] == [4]
    with Recording(tmp_path / "a.hrrec") as recording:
        assert [(gap.after_sequence, gap.before_sequence) for gap in recording.gaps()] == [(0, 4)]


async def _other_log(number: int) -> MemoryBroker:
    broker = MemoryBroker(MemoryServer(), "r")
    for ordinal in range(number, 2 * number):
        await _tick(broker, ordinal)
    return broker


async def test_a_file_of_another_log_of_the_same_run_id_is_not_gone_on_with(tmp_path) -> None:
    path = tmp_path / "a.hrrec"
    await record_run(await _other_log(5), path, follow=False)
    before = path.read_bytes()
    for number in (2, 8):
        broker = await _other_log(number)
        with pytest.raises(OtherLogError, match="another log of that run id"):
            await record_run(broker, path, follow=False)
        with pytest.raises(ExceptionGroup) as raised:
            async with anyio.create_task_group() as tasks, recorded(RunRecording(path=str(path)), broker, tasks):
                pass
        assert raised.group_contains(OtherLogError)
    assert path.read_bytes() == before
