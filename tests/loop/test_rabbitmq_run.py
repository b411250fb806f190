"""Whole runs on RabbitMQ: only the URL differs. What is recorded on one broker is replayed on the other."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import anyio
import pytest
from folding import fold_again, recorded_steps

from broker.connect import connect
from broker.embedded import embedded_server
from broker.local_rabbit import LocalRabbit
from broker.rabbitmq import delete_run
from broker.recording import Recording
from broker.settings import ConnectSettings

pytestmark = [pytest.mark.resources, pytest.mark.timeout(600)]
ROOT = Path(__file__).parents[2]
EXAMPLES = ["smoke", pytest.param("quickstart", marks=[pytest.mark.nightly, pytest.mark.timeout(1800)])]


@pytest.fixture(scope="module")
def rabbit(tmp_path_factory):
    server = LocalRabbit(tmp_path_factory.mktemp("rabbit"))
    anyio.run(server.start)
    yield server
    server.kill()


def run_example(config: str, folder: Path, *arguments: str) -> dict[str, object]:
    command = [sys.executable, "-m", "ops", "run", f"examples/{config}.toml", "--json", "--quiet"]
    command += ["--set", f"run.dir={folder / 'run'}", "--record", str(folder / "run.hrrec"), *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1500, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def on_nats(tmp_path_factory):
    folder = tmp_path_factory.mktemp("nats")
    return folder, run_example("smoke", folder)


@pytest.mark.parametrize("config", EXAMPLES)
async def test_a_run_needs_no_other_change_than_the_url(config, rabbit, on_nats, tmp_path):
    told = run_example(config, tmp_path, "--set", f"broker.url={rabbit.url}")
    assert told.keys() == on_nats[1].keys()
    assert (told["unexplained"], told["doubled"], told["dead_letters"]) == (0, 0, 0)
    if config == "smoke":
        assert (told["steps"], told["trained_rows"]) == (5, 80)
    else:
        rewards = told["reward_by_step"]
        assert sum(rewards[-10:]) / 10 > sum(rewards[:3]) / 3 + 0.2
    with Recording(tmp_path / "run.hrrec") as recording:
        assert (recording.complete, recording.gaps(), recording.missing_payloads()) == (True, [], [])
        steps, manifests = recorded_steps(recording)
        assert len(steps) == told["steps"]
        async with (
            embedded_server(tmp_path / "nats") as server,
            connect(server.url, recording.run, server.connect_settings(), create=True) as broker,
        ):
            assert await fold_again(recording, broker, tmp_path) == (steps, manifests)


async def test_what_was_recorded_on_nats_folds_to_the_same_manifests_on_rabbitmq(rabbit, on_nats, tmp_path):
    settings = ConnectSettings(payload_dir=str(tmp_path / "shared"))
    with Recording(on_nats[0] / "run.hrrec") as recording:
        await delete_run(rabbit.url, recording.run, settings)  # the run above has its id
        async with connect(rabbit.url, recording.run, settings, create=True) as broker:
            assert await fold_again(recording, broker, tmp_path) == recorded_steps(recording)
