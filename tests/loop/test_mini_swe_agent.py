"""The real mini-swe-agent, unmodified, plays tasks of a local Arena against our gateway, and its trajectories are trained on."""

from __future__ import annotations

import pytest

from pipeline.log import RunLog, RunPayloads
from schemas.messages.rollout import EpisodeEnded, InteractionRecorded, Trajectory
from schemas.messages.training import StepTrained
from schemas.topics import EPISODE_ENDED, INTERACTION_RECORDED, STEP_TRAINED, TRAJECTORY_READY

pytestmark = [pytest.mark.resources, pytest.mark.timeout(400)]

CONFIG = """
[run]
id = "mini"
steps = 2

[[streams]]
name = "sums"
stream_id = "sums"
task_envs = { MSWEA_CONFIGURED = "true", MSWEA_COST_TRACKING = "ignore_errors", LITELLM_LOCAL_MODEL_COST_MAP = "True" }

[arena]
url = "local"
poll_interval_s = 0.5
task_timeout_s = 180.0

[sampling]
groups_per_step = 1
slots_per_group = 2
max_staleness = 0

[rollout]
max_new_tokens = 512
max_context_tokens = 65536
max_concurrent_episodes = 2

[engine]
kind = "scripted"
script = "tests.resources.shell_script_policy:add_in_the_shell"

[training]
backend = "standin"

[[local_arena.streams]]
stream_id = "sums"
dataset = "chain_sum"
dataset_options = { min_terms = 2, max_terms = 2, min_digits = 2, max_digits = 2 }
size = 8
turns = ["What is {expression} ?"]
scorer = "exact"
harness = "mini@1"

[[local_arena.harnesses]]
key = "mini"
kind = "command"
timeout_s = 150
{command}
answer_file = "answer.txt"
"""


async def test_mini_swe_agents_trajectories_are_scored_and_trained_on(headrace, tmp_path, mini_swe_agent) -> None:
    config = tmp_path / "mini.toml"
    config.write_text(CONFIG.replace("{command}", mini_swe_agent))
    ends: list[EpisodeEnded] = []
    rows: list[Trajectory] = []
    calls: list[InteractionRecorded] = []
    trained: list[StepTrained] = []
    kept = {EpisodeEnded: ends, Trajectory: rows, InteractionRecorded: calls, StepTrained: trained}
    async with headrace(config=config) as run:
        await run.wait_for_step(1, deadline_s=240)
        topics = [EPISODE_ENDED, TRAJECTORY_READY, INTERACTION_RECORDED, STEP_TRAINED]
        async with run.broker() as broker:
            async with RunLog(broker).read(topics, follow=False) as entries:
                async for entry in entries:
                    kept[type(entry.message)].append(entry.message)
            first = next(call for call in calls if call.ordinal == 0)
            said = bytes(await RunPayloads(broker).get(first.tokens))
        result = await run.result()
    assert {end.status for end in ends} == {"DONE"}, [(end.status, end.error, end.raw_json) for end in ends]
    assert {end.score for end in ends} <= {0.0, 1.0}
    assert 1.0 in {row.reward for row in rows}
    assert all(row.num_interactions == 3 and len(row.rows) == 1 for row in rows)
    assert all(row.rows[0].num_loss_tokens == row.num_completion_tokens for row in rows)
    assert b"COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT" in said  # the client's own instructions reached the gateway
    assert trained
    assert (result["steps"], result["trained_rows"], result["unexplained"], result["dead_letters"]) == (2, 4, 0, 0)
