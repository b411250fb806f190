"""A run whose config holds secrets in plain keeps them to itself: nothing that it publishes, prints or leaves for others tells one."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from broker.recording import Recording
from ops.cli import main
from ops.config import RunConfig
from ops.run_folder import RunFolder

ROOT = Path(__file__).parents[2]
AGENT = """
async def noting(task, *, base_url, api_key, session, **settings):
    assert settings["judge_password"] == "MARKargpassword", settings
    return 0.5
"""
CONFIG = """
[run]
id = "marked"
steps = 3
[[streams]]
name = "reverse"
stream_id = "reverse"
task_envs = { DB_PASS = "MARKdbpass", JUDGE = "MARKjudge", SERVICE_URL = "https://u:MARKurl@h/x", HF_TOKEN = "MARKtoken" }
[[streams]]
name = "own"
stream_id = "own"
runner = "function"
agent = "marked_agents:noting"
rows = "examples/own_agent.jsonl"
task_envs = { GH_PAT = "MARKpat", HTTP_HEADER = "Authorization: Basic MARKheader" }
[streams.agent_args]
difficulty = "plain-setting"
judge_password = "MARKargpassword"
judgeApiKey = "MARKargkey"
env = { SEED = "MARKargenv" }
[streams.agent_args.credentials]
user = "MARKarguser"
[arena]
url = "local"
poll_interval_s = 0.2
task_timeout_s = 30.0
task_envs = { COMMON = "MARKcommon" }
[local_arena]
[[local_arena.harnesses]]
key = "openai-loop"
version = "1"
kind = "openai_loop"
[[local_arena.streams]]
stream_id = "reverse"
dataset = "letter_counting"
harness = "openai-loop@1"
reward_key = "right"
[sampling]
groups_per_step = 4
slots_per_group = 2
max_staleness = 1
[rollout]
max_new_tokens = 16
max_context_tokens = 1024
[engine]
kind = "scripted"
script = "stages.engine.scripts:random_letters"
env = { ENGINE_KEY = "MARKengine" }
[training]
backend = "standin"
"""
MAY_HOLD = {"config.json"}
"""Workers read it; for the owner only."""
OWNERS = {*MAY_HOLD, "arena.json", "secrets.json"}


class MarkedRun(NamedTuple):
    folder: Path
    recording: Path
    told: str


@pytest.fixture(scope="module")
def ended(tmp_path_factory) -> MarkedRun:
    """A run that is over, and what it printed."""
    place = tmp_path_factory.mktemp("marked")
    (place / "run.toml").write_text(CONFIG)
    (place / "marked_agents.py").write_text(AGENT)
    command = [sys.executable, "-m", "ops", "run", str(place / "run.toml"), "--set", f"run.dir={place / 'run'}"]
    done = subprocess.run(
        [*command, "--record", str(place / "run.hrrec")],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(place)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return MarkedRun(place / "run", place / "run.hrrec", done.stdout + done.stderr)


def test_nothing_that_a_run_leaves_for_others_holds_a_secret(ended) -> None:
    files = [path for path in ended.folder.rglob("*") if path.is_file()]
    holding = {path.relative_to(ended.folder).as_posix() for path in files if b"MARK" in path.read_bytes()}
    assert holding == MAY_HOLD
    assert {stat.S_IMODE((ended.folder / name).stat().st_mode) for name in OWNERS} == {0o600}
    assert "MARK" not in ended.told


def test_a_recording_of_it_holds_none(ended) -> None:
    with Recording(ended.recording) as recording:
        records = list(recording.records())
        payloads = [
            bytes(data)
            for number in range(len(recording.lookup.payloads))
            for data in recording._payloads(number).values()
        ]
    assert len(payloads) > 10
    assert [record.subject for record in records if b"MARK" in record.data] == []
    assert not any(b"MARK" in payload for payload in payloads)
    assert any(b"plain-setting" in record.data for record in records if ".run.started." in record.subject)


def test_no_command_that_looks_at_it_tells_one(ended, tmp_path, capsys) -> None:
    run, page, tables = str(ended.folder), tmp_path / "report.html", tmp_path / "tables"
    for command in (
        ("status", run),
        ("status", run, "--json"),
        ("tap", ">", "--from-start", "--run", run, "--json"),
        ("tap", "run.started", "--from-start", "--run", run),
        ("report", run, "-o", str(page)),
        ("report", str(ended.recording), "--json"),
        ("inspect", str(ended.recording)),
        ("export", run, str(tables)),
    ):
        assert main(list(command)) == 0, command
    printed = capsys.readouterr()
    assert "plain-setting" in printed.out
    assert "MARK" not in printed.out + printed.err
    assert "MARK" not in page.read_text()
    assert not any(b"MARK" in path.read_bytes() for path in tables.rglob("*") if path.is_file())


def test_a_config_that_others_could_read_is_written_anew_for_the_owner(tmp_path) -> None:
    folder = RunFolder(tmp_path)
    folder.config_file.write_text("{}")
    folder.write_config(RunConfig())
    assert stat.S_IMODE(folder.config_file.stat().st_mode) == 0o600
