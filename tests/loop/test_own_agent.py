"""A whole run whose episodes are played by a user's own function: no Arena, rewards per completion."""

from __future__ import annotations

from pathlib import Path

from pipeline.log import RunLog
from schemas.messages.rollout import EpisodeEnded, Trajectory
from schemas.topics import EPISODE_ENDED, TRAJECTORY_READY

OWN_AGENT = Path(__file__).parents[2] / "examples" / "own_agent.toml"


async def test_a_users_function_is_trained_on_without_an_arena(headrace) -> None:
    ends: list[EpisodeEnded] = []
    rows: list[Trajectory] = []
    async with headrace("--steps", "3", "--set", "training.standin_step_s=0.5", config=OWN_AGENT) as run:
        await run.wait_for_step(2)
        assert "arena" not in run.children()
        async with (
            run.broker() as broker,
            RunLog(broker).read([EPISODE_ENDED, TRAJECTORY_READY], follow=False) as entries,
        ):
            async for entry in entries:
                (ends if isinstance(entry.message, EpisodeEnded) else rows).append(entry.message)
        result = await run.result()
        assert run.children() == {}
    assert (result["steps"], result["unexplained"], result["dead_letters"]) == (3, 0, 0)
    assert set(result["classes"]) == {"scored"}
    assert {len(end.turn_rewards) for end in ends} == {2}
    assert {end.data_id for end in ends} <= {
        "river",
        "mill",
        "wheel",
        "stone",
        "brook",
        "weir",
        "gate",
        "sluice",
        "pond",
        "water",
    }
    assert all(row.num_interactions == 2 and row.rewards_per_completion for row in rows if not row.rejected)
