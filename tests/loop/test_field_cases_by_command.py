"""Reported faults of configs and of operating, again through the command that people type."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# verl-project/verl#559


@pytest.mark.parametrize(
    ("groups_per_step", "mini_batch_groups", "named"),
    [(10, 4, b"mini_batch_groups = 4 does not divide sampling.groups_per_step = 10"), (8, 16, b"16")],
)
async def test_verl_559_sizes_that_do_not_divide_are_refused_with_both_numbers(
    headrace, groups_per_step, mini_batch_groups, named
) -> None:
    sizes = (f"sampling.groups_per_step={groups_per_step}", f"assembly.mini_batch_groups={mini_batch_groups}")
    async with headrace("--set", sizes[0], "--set", sizes[1]) as run:
        assert await run.process.wait() == 1
        assert named in run.stderr
        assert str(groups_per_step).encode() in run.stderr
        assert run.children() == {}


# backbay-labs/clawdstrike#107


@pytest.mark.parametrize("name", ["run.7", "run 7", "run*", "rün"])
async def test_clawdstrike_107_a_run_id_that_can_not_be_a_subject_token_is_refused_by_name(headrace, name) -> None:
    async with headrace("--set", f'run.id="{name}"') as run:
        assert await run.process.wait() == 1
        assert b"run.id" in run.stderr
        assert b"Traceback" not in run.stderr


# NVIDIA-NeMo/RL#3248


@pytest.mark.nightly
async def test_nemo_rl_3248_steps_and_epochs_both_bound_a_run_also_after_a_resume(headrace, tmp_path) -> None:
    bounds = ("--set", "run.epochs=2", "--set", "sampling.epoch_size_groups=12", "--set", "training.standin_step_s=0.3")
    async with headrace("--steps", "4", *bounds) as run:
        assert (await run.result())["steps"] == 4
    async with headrace("--steps", "10", *bounds, folder=tmp_path / "run") as run:
        result = await run.result()
    assert result["steps"] == 6
    assert result["groups"]["trained"] == 24
    assert (result["unexplained"], result["doubled"]) == (0, 0)


# nats-io/nats.py#373


async def test_nats_py_373_a_run_that_waits_for_prompts_ends_at_the_first_signal(headrace, wait_until) -> None:
    opened = ("--set", "streams.vowels.open=true", "--set", 'streams.vowels.rows=""')
    async with headrace(*opened, config=ROOT / "examples" / "own_agent.toml") as run:
        await run.wait_for_endpoints()
        await wait_until(lambda: len(run.children()) >= 3, deadline_s=60)
        run.interrupt()
        assert await run.process.wait() == 130
        assert run.children() == {}
