"""A real verifiers environment, with an interpreter of its own, plays a run's episodes and is trained on."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pipeline.log import RunLog
from schemas.messages.rollout import EpisodeEnded, Trajectory
from schemas.topics import EPISODE_ENDED, TRAJECTORY_READY

pytestmark = pytest.mark.resources

ROOT = Path(__file__).parents[2]
TASKSETS = ROOT / "tests" / "resources" / "verifiers"


@pytest.fixture
def interpreter() -> str:
    cache = Path(os.environ.get("HEADRACE_CACHE", Path.home() / ".cache" / "headrace"))
    found = cache / "clients/verifiers/bin/python"
    if not (cache / "clients/verifiers.done").exists():
        reason = f"{found} is missing: run tests/resources/install_clients.sh"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    return str(found)


async def test_a_verifiers_environment_is_played_and_trained_on(headrace, tmp_path, interpreter) -> None:
    config = tmp_path / "verifiers.toml"
    text = (ROOT / "examples" / "own_agent.toml").read_text()
    head, tail = text.split("[[streams]]")[0], text.split("agent_timeout_s = 60.0")[1]
    stream = (
        '[[streams]]\nname = "vowels"\nstream_id = "vowels"\nrunner = "verifiers"\nagent = "vowel-tasks"\n'
        f'agent_python = "{interpreter}"\nagent_args.agent.runtime.type = "subprocess"\ntask_envs = {{ PYTHONPATH = "{TASKSETS}" }}\n'
    )
    config.write_text(head + stream + tail)
    ends: list[EpisodeEnded] = []
    rows: list[Trajectory] = []
    async with headrace("--steps", "2", "--set", "training.standin_step_s=0.5", config=config) as run:
        await run.wait_for_step(1, deadline_s=180)
        async with (
            run.broker() as broker,
            RunLog(broker).read([EPISODE_ENDED, TRAJECTORY_READY], follow=False) as entries,
        ):
            async for entry in entries:
                (ends if isinstance(entry.message, EpisodeEnded) else rows).append(entry.message)
        result = await run.result()
    assert (result["steps"], result["unexplained"], result["dead_letters"]) == (2, 0, 0)
    assert {end.outcome for end in ends} == {"scored"}, [end.error for end in ends]
    assert {end.data_id for end in ends} <= {"river", "mill", "wheel", "stone"}
    assert all(row.num_interactions == 2 and row.num_completion_tokens for row in rows)
