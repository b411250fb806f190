"""Staleness of whole runs in real processes: a slow trainer, slow loads, a long-tailed generator. Checked from the log alone."""

from __future__ import annotations

import msgspec
import pytest

from ops.connection import look_at_run
from pipeline.log import RunLog, RunPayloads
from schemas.messages.rollout import InteractionRecorded, RowTokens, Trajectory
from schemas.messages.training import Manifest, StepAssembled, WeightsLoaded
from schemas.topics import INTERACTION_RECORDED, STEP_ASSEMBLED, TRAJECTORY_READY, WEIGHTS_LOADED


def slow(max_staleness: int, *, trainer_s: float = 0.4) -> list[str]:
    settings = {
        "sampling.max_staleness": max_staleness,
        "training.standin_step_s": trainer_s,
        "engine.script": "stages.engine.scripts:long_tailed_letters",
        "engine.script_chunk_s": 0.02,
        "engine.script_load_s": 0.3,
        "rollout.max_new_tokens": 64,
        "training.keep_checkpoints": 1,
    }
    return [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]


async def scan(run) -> tuple[list[int], list[int]]:
    """Staleness of every trained row, from its own tokens' versions; and the versions that the engine loaded."""
    async with look_at_run(str(run.folder.path), name="test") as opened:
        broker = opened.broker
        payloads = RunPayloads(broker)
        rows: dict[str, Trajectory] = {}
        loaded: list[int] = []
        found: list[int] = []
        topics = [INTERACTION_RECORDED, TRAJECTORY_READY, WEIGHTS_LOADED, STEP_ASSEMBLED]
        async with RunLog(broker).read(topics, follow=False) as entries:
            async for entry in entries:
                match entry.message:
                    case Trajectory() as trajectory:
                        rows.update((row.row, row) for row in trajectory.rows)
                    case WeightsLoaded() as one:
                        loaded.append(one.version)
                    case StepAssembled() as step:
                        manifest = msgspec.msgpack.decode(await payloads.get(step.manifest), type=Manifest)
                        for name in manifest.row_ids:
                            tokens = msgspec.msgpack.decode(await payloads.get(rows[name].tokens), type=RowTokens)
                            sampled = tokens.versions.as_numpy()[tokens.loss_mask.as_numpy()]
                            found.append(step.step - 1 - int(sampled.min()))
                    case InteractionRecorded() as call:
                        assert call.num_completion > 0
                    case _:
                        pass
    return found, loaded


@pytest.mark.nightly
@pytest.mark.timeout(1500)
@pytest.mark.parametrize(("max_staleness", "steps"), [(0, 6), (0, 100), (1, 100), (4, 100)])
async def test_no_row_of_a_slow_run_is_older_than_allowed(headrace, max_staleness: int, steps: int) -> None:
    async with headrace("--steps", str(steps), *slow(max_staleness)) as run:
        result = await run.result()
    staleness, loaded = await scan(run)
    assert len(staleness) >= 16 * steps * 0.8
    assert min(staleness) >= 0
    assert max(staleness) <= max_staleness
    assert loaded == sorted(loaded)
    assert result["steps"] == steps
    assert (result["unexplained"], result["doubled"], result["dead_letters"]) == (0, 0, 0)
