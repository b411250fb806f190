"""Whole runs recorded beside them: what the file holds, what a replay gives, and what can be seen once the run is over."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import anyio
import msgspec
import pytest
from folding import fold_again, recorded_steps

from broker.connect import connect
from broker.embedded import embedded_server
from broker.memory import MemoryBroker, MemoryServer
from broker.recording import Recording
from ops.cli import main
from ops.connection import look_at_run, open_run
from ops.logtools.record import record_run
from ops.logtools.stage_diffs import diff_stage
from ops.running.recording import RunRecording, recorded
from schemas.messages.training import Manifest
from schemas.topics import EPISODE_ENDED, STEP_ASSEMBLED, STEP_TRAINED

ROOT = Path(__file__).parents[2]


class RecordedRun(NamedTuple):
    folder: Path
    file: Path
    stream: str
    scores: set[float]


def run_recorded(config: str, steps: int, folder: Path, file: Path, *arguments: str) -> None:
    """`headrace run CONFIG --record FILE`, to its end."""
    command = [
        sys.executable,
        "-m",
        "ops",
        "run",
        f"examples/{config}.toml",
        "--steps",
        str(steps),
        "--json",
        "--quiet",
    ]
    command += ["--set", f"run.dir={folder}", "--record", str(file), *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert f"payloads: {file}" in done.stderr


@pytest.fixture(
    scope="module",
    params=["smoke", pytest.param("quickstart", marks=[pytest.mark.nightly, pytest.mark.timeout(900)])],
)
def ended(request, tmp_path_factory):
    """A run that is over, and its recording."""
    folder = tmp_path_factory.mktemp(request.param)
    run_recorded(request.param, 6, folder / "run", folder / "run.hrrec")
    with Recording(folder / "run.hrrec") as recording:
        ends = [
            EPISODE_ENDED.decode(record.data) for record in recording.records([EPISODE_ENDED.filter(recording.run)])
        ]
    stream = max({end.stream for end in ends}, key=lambda name: sum(end.stream == name for end in ends))
    scores = {end.score for end in ends if end.stream == stream and end.score is not None}
    return RecordedRun(folder / "run", folder / "run.hrrec", stream, scores)


async def messages_of(broker, filters=()):
    async with broker.read(list(filters) or [f"hr.{broker.run}.>"], follow=False) as records:
        return [(record.subject, record.data) async for record in records]


async def log_of(folder):
    async with open_run(str(folder)) as broker:
        return await messages_of(broker)


async def test_everything_that_stands_on_the_log_is_recorded_with_its_payloads(ended):
    with Recording(ended.file) as recording:
        assert recording.complete
        assert (recording.damages, recording.gaps(), recording.missing_payloads()) == ([], [], [])
        told = [(record.subject, record.data) for record in recording.records()]
    assert await log_of(ended.folder) == told
    assert any(".run.finished." in subject for subject, _ in told)


def test_a_replay_into_a_fresh_broker_gives_the_same_log(ended, tmp_path):
    again = tmp_path / "again"
    assert main(["replay", str(ended.file), "--into", str(again), "--quiet"]) == 0
    assert anyio.run(log_of, again) == anyio.run(log_of, ended.folder)


async def test_the_replayed_log_folds_to_the_same_manifests_byte_for_byte(ended, tmp_path):
    with Recording(ended.file) as recording:
        steps, manifests = recorded_steps(recording)
        async with (
            embedded_server(tmp_path / "nats") as server,
            connect(server.url, recording.run, server.connect_settings(), create=True) as broker,
        ):
            folded, again = await fold_again(recording, broker, tmp_path)
    assert len(manifests) >= 6
    assert again == manifests
    assert [msgspec.msgpack.decode(raw, type=Manifest).step for raw in again] == list(range(1, len(steps) + 1))
    assert [STEP_ASSEMBLED.encode(step) for step in folded] == [STEP_ASSEMBLED.encode(step) for step in steps]


@pytest.mark.parametrize("stage", ["reward", "assembly", "training"])
async def test_todays_code_makes_of_the_recording_what_the_run_made(ended, stage):
    with Recording(ended.file) as recording:
        report = await diff_stage(recording, stage)
        trained = [STEP_TRAINED.decode(r.data) for r in recording.records([STEP_TRAINED.filter(recording.run)])]
    assert report.changed == []
    assert report.compared >= 6
    if stage == "training":
        # Each step's weights are compared by their digest: equal means bitwise.
        assert report.compared == len(trained)
        assert all(step.digest for step in trained)


async def test_a_changed_reward_threshold_names_exactly_the_changed_episodes(ended):
    threshold = sorted(ended.scores)[len(ended.scores) // 2]
    with Recording(ended.file) as recording:
        report = await diff_stage(recording, "reward", [f"streams.{ended.stream}.reward_threshold={threshold}"])
        expected: set[str] = set()
        for record in recording.records([EPISODE_ENDED.filter(recording.run)]):
            end = EPISODE_ENDED.decode(record.data)
            if end.final and end.stream == ended.stream and end.score is not None and end.score not in (0.0, 1.0):
                expected.add(f"{end.group}.{end.slot}")
    assert expected
    assert {difference.key for difference in report.changed} == expected


def test_a_run_that_is_over_can_be_looked_at(ended, capsys, tmp_path):
    def called(*arguments: str) -> str:
        assert main(list(arguments)) == 0
        return capsys.readouterr().out

    folder = str(ended.folder)
    looked = called("status", folder)
    assert "not running" in looked
    assert "nothing waits before any stage" in looked
    assert json.loads(called("status", folder, "--json"))["is_running"] is False
    steps = (called("tap", "step.trained", "--run", folder, "--from-start", "--json")).splitlines()
    assert len(steps) == 6
    assert "trained" in called("why", "step:3", "--in", folder)
    assert "no dead letters" in called("dead", "list", "--in", folder)
    assert json.loads(called("export", folder, str(tmp_path), "--table", "steps", "--json"))["steps"] == 6
    later = tmp_path / "later.hrrec"
    assert "recorded" in called("record", folder, "-o", str(later), "--until-end")
    with Recording(later) as second, Recording(ended.file) as first:
        assert list(second.records()) == list(first.records())


def test_a_live_tap_of_a_run_that_is_over_says_that_nothing_comes(ended, capsys):
    with pytest.raises(SystemExit):
        main(["tap", "step", "--run", str(ended.folder)])
    assert "not running, so nothing new comes" in capsys.readouterr().err


async def test_two_may_look_at_once(ended):
    async with look_at_run(str(ended.folder)) as first, look_at_run(str(ended.folder)) as second:
        assert (first.is_running, second.is_running) == (False, True)
        assert await messages_of(first.broker) == await messages_of(second.broker)


@pytest.mark.nightly
async def test_a_resumed_run_goes_on_with_its_recording(tmp_path):
    for steps in (2, 4):
        run_recorded("smoke", steps, tmp_path / "run", tmp_path / "run.hrrec")
    with Recording(tmp_path / "run.hrrec") as recording:
        told = [(record.subject, record.data) for record in recording.records()]
        assert recording.gaps() == []
    assert await log_of(tmp_path / "run") == told


def test_a_file_that_can_not_be_gone_on_with_is_refused_before_anything_starts(tmp_path):
    file = tmp_path / "notes.hrrec"
    file.write_text("not a recording")
    command = [sys.executable, "-m", "ops", "run", "examples/smoke.toml", "--set", f"run.dir={tmp_path / 'run'}"]
    done = subprocess.run(
        [*command, "--record", str(file)], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1
    assert "expected a headrace recording" in done.stderr
    assert not (tmp_path / "run" / "nats").exists()
    assert file.read_text() == "not a recording"


class FailingBroker(MemoryBroker):
    """Its log can't be read."""

    def read(self, filters, *, after_sequence=0, follow=True, headers_only=False):
        raise OSError(28, "No space left on device")


async def test_a_recorder_that_fails_is_told_and_the_run_goes_on(tmp_path):
    wanted = RunRecording(path=str(tmp_path / "run.hrrec"))
    broker = FailingBroker(MemoryServer(), "r")
    went_on = False
    async with anyio.create_task_group() as tasks, recorded(wanted, broker, tasks) as outcome:
        await anyio.wait_all_tasks_blocked()
        went_on = True
    assert went_on
    assert "No space left on device" in outcome.failure


async def test_a_cancelled_run_leaves_what_stood(tmp_path):
    broker = MemoryBroker(MemoryServer(), "r")
    file = tmp_path / "run.hrrec"
    async with anyio.create_task_group() as tasks, recorded(RunRecording(path=str(file)), broker, tasks):
        await broker.publish("hr.r.fold.tick.1", b"\x80")
        tasks.cancel_scope.cancel()
    await record_run(broker, file, follow=False)
    with Recording(file) as recording:
        assert recording.num_messages == 1
        assert recording.complete
