"""How a worker process ends tells whether it is worth starting it again, and while it lives it leaves signs of its progress."""

from __future__ import annotations

import sys

import anyio
import pytest

from ops.config import decode_config
from ops.engines.life import EngineGivenUpError
from ops.nodes.ranks import RanksGivenUpError
from ops.run_folder import RunFolder
from ops.supervise.process import EXIT_GIVEN_UP
from ops.workers.main import exit_code, say_progress
from ops.workers.trainer import open_sinks, settings_errors
from pipeline.metrics import Metrics
from schemas.errors import ConfigError
from stages.training import checkpoints, lineage
from stages.training.errors import CheckpointError, CollectiveError, OtherSettingsError, TrainingError


@pytest.mark.parametrize(
    "error",
    [ConfigError("training.trackers: …"), OtherSettingsError("…"), EngineGivenUpError("…"), RanksGivenUpError("…")],
    ids=lambda error: type(error).__name__,
)
def test_what_no_other_start_can_mend_is_not_tried_again(error) -> None:
    assert exit_code([RuntimeError("beside it"), error]) == EXIT_GIVEN_UP


@pytest.mark.parametrize(
    "error",
    [
        CollectiveError("a rank died"),
        CheckpointError("half written"),
        TrainingError("step 7 next"),
        OSError("no space"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_what_may_heal_is_tried_again(error) -> None:
    assert exit_code([error]) == 1


def test_a_tracker_that_is_missing_is_an_error_of_the_settings(tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    tree = {"streams": [{"name": "a", "stream_id": "a"}], "training": {"trackers": ["wandb"]}}
    with pytest.raises(ConfigError, match="wandb is not installed"), settings_errors():
        open_sinks(decode_config(tree), RunFolder(tmp_path))
    with pytest.raises(CollectiveError), settings_errors():
        raise CollectiveError("a rank died")


def test_a_checkpoint_of_other_settings_is_told_apart_from_a_damaged_one(tmp_path) -> None:
    position = checkpoints.Position(step=1, generation=1, num_updates=1, settings_hash="of this")
    checkpoints.part_folder(tmp_path, position).mkdir()
    checkpoints.seal(tmp_path, position, world_size=1)
    assert lineage.newest_whole(tmp_path, "of this") is not None
    with pytest.raises(OtherSettingsError, match="was written with other model or optimizer settings"):
        lineage.newest_whole(tmp_path, "of something else")


async def test_progress_is_noted_when_a_message_more_stands_on_the_log(tmp_path, wait_until) -> None:
    metrics, place = Metrics("r", "trainer"), tmp_path / "trainer"
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(say_progress, lambda: [metrics.report()], place)
        await anyio.wait_all_tasks_blocked()
        assert not place.exists()
        metrics.published += 1
        await wait_until(place.exists)
        first = place.stat().st_mtime_ns
        metrics.published += 1
        await wait_until(lambda: place.stat().st_mtime_ns != first)
        tasks.cancel_scope.cancel()
