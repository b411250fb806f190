"""A run whose engine and trainer share their machine, in real processes."""

from __future__ import annotations

import signal

import pytest

from pipeline.log import RunLog
from schemas.messages.training import StepTrained
from schemas.topics import STEP_TRAINED

SHARED = ("--set", "engine.time_shared=true", "--set", "engine.time_share_ttl_s=2")
SMALL = (
    *("--set", "policy.hidden_size=64", "--set", "policy.num_layers=1", "--set", "policy.warmup_max_updates=2"),
    *("--set", "policy.warmup_conversations=16", "--set", "engine.kind=builtin", "--set", "training.backend=torch"),
)


async def trained(run) -> list[StepTrained]:
    async with run.broker() as broker, RunLog(broker).read([STEP_TRAINED], follow=False) as entries:
        return [entry.message async for entry in entries]


async def test_the_engine_rests_during_every_step_and_the_run_goes_on(headrace) -> None:
    async with headrace("--steps", "5", "--set", "training.standin_step_s=0.2", *SHARED) as run:
        await run.wait_for_step(2)
        steps = await trained(run)
        for message in steps:
            assert message.stats["time_share/engines_resting"] == 1
            assert message.stats["time_share/engines_working"] == 0
        run.children()["trainer"].send_signal(signal.SIGKILL)  # most likely while the engine rests for it
        result = await run.result()
    assert result["steps"] == 5
    assert (result["unexplained"], result["doubled"], result["dead_letters"]) == (0, 0, 0)


@pytest.mark.nightly
async def test_the_builtin_engine_and_a_torch_trainer_take_turns(headrace) -> None:
    async with headrace("--steps", "4", *SMALL, *SHARED) as run:
        await run.wait_for_step(3, deadline_s=150)
        for message in await trained(run):
            assert message.stats["time_share/engines_resting"] == 1
        result = await run.result()
    assert result["steps"] == 4
    assert (result["unexplained"], result["doubled"]) == (0, 0)
