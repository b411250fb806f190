import msgspec
import pytest
from synthetic import SyntheticRun

from broker.api import Record
from broker.memory import MemoryBroker, MemoryServer
from broker.recording import Recording, RecordingWriter, new_header
from ops.config import assembly_settings
from ops.logtools.differences import DifferenceKind
from ops.logtools.replay import Replay, ReplaySettings
from ops.logtools.stage_diffs import diff_stage
from pipeline.fold import FoldRunner
from pipeline.metrics import Metrics
from schemas.errors import ConfigError
from schemas.messages.training import Manifest
from schemas.topics import GROUP_CLOSED, RUN_STARTED, STEP_ASSEMBLED, TRAJECTORY_READY
from stages.assembly.fold import AssemblyFold


@pytest.mark.parametrize("stage", ["reward", "assembly", "training"])
async def test_todays_code_makes_what_was_recorded(recording, stage):
    report = await diff_stage(recording, stage)
    assert report.compared > 4
    assert report.changed == []
    assert report.unfinished == []


async def test_a_changed_threshold_names_exactly_the_changed_episodes(chaotic, recording):
    report = await diff_stage(recording, "reward", ["streams.math.reward_threshold=0.9"])
    expected = set()
    for record in recording.records([TRAJECTORY_READY.filter("r")]):
        message = TRAJECTORY_READY.decode(record.data)
        if message.stream == "math" and not message.rejected and message.score == 0.5:
            expected.add(f"{message.group}.{message.slot}")
    assert {difference.key for difference in report.changed} == expected
    assert expected
    assert all("reward" in [field.path for field in difference.fields] for difference in report.changed)


async def test_another_aggregation_shows_row_by_row(recording):
    report = await diff_stage(recording, "assembly", ["assembly.aggregation=seq_mean"])
    assert {difference.topic for difference in report.changed} == {"step.assembled"}
    assert any(field.path.startswith("manifest.loss_weight[") for field in report.changed[0].fields)


async def test_training_starts_nothing_and_gives_the_recorded_weights(chaotic, recording):
    assert chaotic.digests
    report = await diff_stage(recording, "training")
    assert report.compared == len(chaotic.digests)


async def test_training_from_other_weights_than_the_runs_is_one_difference_with_its_reason(chaotic, tmp_path):
    async with chaotic.broker.read(["hr.r.>"], follow=False) as stream:
        records = [record async for record in stream]
    assert records[0].subject == "hr.r.run.started.0"
    started = msgspec.structs.replace(RUN_STARTED.decode(records[0].data), policy_digest="of the run")
    records[0] = msgspec.structs.replace(records[0], data=RUN_STARTED.encode(started))
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (folder / name).write_bytes(b"{}")
    with Recording(rewrite(tmp_path / "begun.hrrec", records)) as opened:
        report = await diff_stage(opened, "training", ["training.backend=torch", f"policy.folder={folder}"])
    assert [(one.topic, one.kind) for one in report.changed] == [("run.started", DifferenceKind.FAILED)]
    assert "the run began with of the run" in report.changed[0].reason


async def test_a_stage_that_there_is_not_is_refused(recording):
    with pytest.raises(ConfigError, match="expected one of reward, assembly, training"):
        await diff_stage(recording, "sampling")


async def test_a_recording_without_its_start_can_not_be_diffed(chaotic, tmp_path):
    async with chaotic.broker.read(["hr.r.>"], after_sequence=5, follow=False) as stream:
        records = [record async for record in stream]
    path = rewrite(tmp_path / "late.hrrec", records)
    with Recording(path) as opened, pytest.raises(ConfigError, match=r"holds no run\.started"):
        await diff_stage(opened, "assembly")


async def test_a_log_cut_in_a_group_names_the_group_and_its_missing_slots(chaotic, tmp_path):
    async with chaotic.broker.read(["hr.r.>"], follow=False) as stream:
        records = [record async for record in stream]
    first_close = next(i for i, record in enumerate(records) if ".group.closed." in record.subject)
    path = rewrite(tmp_path / "cut.hrrec", records[: first_close - 40])
    with Recording(path) as opened:
        report = await diff_stage(opened, "assembly")
    assert report.differences == 0
    assert any(line.startswith("group g0000000: the recording ends without its slots") for line in report.unfinished)


async def test_swapped_arrivals_give_each_row_the_same_advantage(chaotic, tmp_path):
    async with chaotic.broker.read(["hr.r.>"], follow=False) as stream:
        records = [record async for record in stream]
    path = rewrite(tmp_path / "swapped.hrrec", _swap_arrivals(records))
    with Recording(path) as opened:
        assembly = await diff_stage(opened, "assembly")
        for difference in assembly.changed:
            assert not any(".advantage[" in field.path or ".reward[" in field.path for field in difference.fields)


def _swap_arrivals(records):
    """Two neighbouring trajectories of one group change places."""
    swapped = list(records)
    ready = [i for i, record in enumerate(records) if ".trajectory.ready." in record.subject]
    by_group = {}
    for i in ready:
        by_group.setdefault(records[i].subject.split(".")[4], []).append(i)
    a, b = next(places for places in by_group.values() if len(places) == 4)[:2]
    swapped[a] = msgspec.structs.replace(records[b], sequence=records[a].sequence)
    swapped[b] = msgspec.structs.replace(records[a], sequence=records[b].sequence)
    return swapped


def rewrite(path, records):
    writer = RecordingWriter.open(path, new_header("r", headrace_version="0", redactions=[], weights="first"))
    writer.write_messages(records)
    writer.close()
    return path


async def test_a_changed_recording_shows_what_is_missing_and_what_is_new(chaotic, tmp_path):
    async with chaotic.broker.read(["hr.r.>"], follow=False) as stream:
        records = [record async for record in stream]
    forged = []
    for record in records:
        if record.subject == "hr.r.group.closed.g0000001":
            forged.append(
                Record(subject="hr.r.group.closed.g9999999", sequence=record.sequence, data=record.data, unix_time_s=0)
            )
        else:
            forged.append(record)
    with Recording(rewrite(tmp_path / "forged.hrrec", forged)) as opened:
        report = await diff_stage(opened, "assembly")
    kinds = {(difference.key, difference.kind) for difference in report.changed if difference.topic == "group.closed"}
    assert kinds == {("g0000001", DifferenceKind.EXTRA), ("g9999999", DifferenceKind.MISSING)}


async def test_a_replay_folded_again_gives_the_same_manifests_byte_for_byte(chaotic, recording):
    fresh = MemoryBroker(MemoryServer(), "r")
    inputs = [f"hr.r.{name}.>" for name in ("group.issued", "trajectory", "fold", "step.trained", "run")]
    await Replay(recording, fresh, ReplaySettings(filters=tuple(inputs))).run()
    fold = AssemblyFold(assembly_settings(chaotic.config))
    runner = FoldRunner(fold, fresh, Metrics("r", "assembly"))
    async with fresh.read([topic.filter("r") for topic in fold.consumes], follow=False) as records:
        async for record in records:
            await runner.fold_record(record)
    for topic in (GROUP_CLOSED, STEP_ASSEMBLED):
        for record in recording.records([topic.filter("r")]):
            assert (await fresh.get(record.subject)).data == record.data
    for record in recording.records([STEP_ASSEMBLED.filter("r")]):
        ref = STEP_ASSEMBLED.decode(record.data).manifest
        assert bytes(await fresh.payloads.get(ref)) == bytes(recording.payload(ref))
        assert msgspec.msgpack.decode(recording.payload(ref), type=Manifest).run == "r"


async def test_the_same_run_is_the_same_recording():
    first = await SyntheticRun(seed=3, num_groups=5).build()
    second = await SyntheticRun(seed=3, num_groups=5).build()
    assert first.digests == second.digests
