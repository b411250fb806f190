"""A run that trains a LoRA adapter and publishes nothing else, in real processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from ops.connection import look_at_run
from pipeline.log import RunLog
from schemas.messages.training import WeightsLoaded, WeightsPublished
from schemas.topics import WEIGHTS_LOADED, WEIGHTS_PUBLISHED


@pytest.mark.nightly
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kind", ["builtin", "vllm", "sglang"])
async def test_an_engine_serves_adapters_that_are_published_alone(headrace, kind: str) -> None:
    settings = {
        "policy.hidden_size": 64,
        "policy.num_heads": 2,
        "policy.num_layers": 1,
        "policy.warmup_max_updates": 2,
        "policy.warmup_conversations": 16,
        "engine.kind": kind,
        "training.backend": "torch",
        "training.lora.enabled": "true",
        "training.lora.rank": 4,
    }
    arguments = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    async with headrace("--steps", "3", *arguments) as run:
        result = await run.result()
    assert result["steps"] == 3
    assert (result["unexplained"], result["doubled"], result["dead_letters"]) == (0, 0, 0)
    published: list[WeightsPublished] = []
    loaded: list[int] = []
    async with (
        look_at_run(str(run.folder.path), name="test") as opened,
        RunLog(opened.broker).read([WEIGHTS_PUBLISHED, WEIGHTS_LOADED], follow=False) as entries,
    ):
        async for entry in entries:
            match entry.message:
                case WeightsPublished() as one:
                    published.append(one)
                case WeightsLoaded() as one:
                    loaded.append(one.version)
                case _:
                    pass
    assert [one.version for one in published] == [1, 2, 3]
    assert all(one.adapter for one in published)
    assert loaded
    assert loaded[-1] in (2, 3)
    assert {path.name for path in files(published[-1].directory)} >= {
        "adapter_config.json",
        "adapter_model.safetensors",
    }


def files(folder: str) -> list[Path]:
    return list(Path(folder).iterdir())
