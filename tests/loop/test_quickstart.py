"""The first run with its real policy, engine and trainer. Long: the policy is warmed up first, once."""

from __future__ import annotations

from pathlib import Path

import pytest

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart.toml"


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", [0, 1, 2])
async def test_the_first_run_learns(headrace, seed: int) -> None:
    async with headrace("--set", f"run.seed={seed}", config=QUICKSTART) as run:
        result = await run.result()
    rewards = result["reward_by_step"]
    assert sum(rewards[:3]) / 3 <= 0.45
    assert sum(rewards[-10:]) / 10 >= 0.8
    assert (result["unexplained"], result["doubled"], result["dead_letters"]) == (0, 0, 0)
    assert result["staleness"]["max"] <= result["staleness"]["bound"]


@pytest.mark.nightly
@pytest.mark.timeout(900)
async def test_every_kind_of_process_may_be_killed_while_a_policy_is_trained(headrace, wait_until) -> None:
    async with headrace("--steps", "24", config=QUICKSTART) as run:
        for number, kind in enumerate(("gateway", "stages", "trainer", "arena", "nats"), start=1):
            await run.wait_for_step(3 * number, deadline_s=300.0)
            victim = run.children()[kind]
            victim.kill()
            await wait_until(lambda k=kind, v=victim: run.children().get(k, v).pid != v.pid)
        result = await run.result()
    assert result["steps"] == 24
    assert (result["unexplained"], result["doubled"]) == (0, 0)
    assert result["groups"]["trained"] == 24 * 8
