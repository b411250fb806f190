"""LoRA adapters on real servers, beyond swaps under load: a prefix shared by all versions, long requests, bad adapters."""

from contextlib import aclosing
from pathlib import Path

import anyio
import numpy as np
import pytest
import torch
from adapter_folders import write_adapter
from asking import ask, collect, ids_of, versions_of
from real_servers import greedy_ids, logprobs

from schemas.messages.rollout import FinishReason
from stages.clients.engines import HttpEngineSettings, http_engine
from stages.ports import SwapMode, WeightsRefusedError

pytestmark = [pytest.mark.resources, pytest.mark.timeout(1500)]
PROMPT = np.arange(60, 108, dtype=np.int32)
"""Three blocks of a prefix cache."""


async def check_greedy(engine, folder: str, version: int) -> None:
    chunks = await collect(engine, ask(f"greedy-{version}", 12, prompt=PROMPT, temperature=0.0, min_version=version))
    ids = ids_of(chunks)
    assert set(versions_of(chunks)) == {version}
    assert ids.tolist() == greedy_ids(folder, PROMPT, 12)
    told = np.concatenate([chunk.logprobs for chunk in chunks])
    np.testing.assert_allclose(told, logprobs(folder, PROMPT, ids, 0.0), atol=1e-4)


async def test_the_oldest_adapter_serves_its_requests_until_its_place_is_needed(real_with_adapters, adapters):
    kind, url = real_with_adapters
    settings = HttpEngineSettings(adapters=True, adapter_wait_s=0.5)
    async with http_engine(kind, "e", url, settings) as engine, http_engine(kind, "other", url, settings) as other:
        first = (await engine.health()).version + 1
        await engine.load_adapter(adapters[first % 4], first, SwapMode.RECOMPUTE)
        found = []
        begun = anyio.Event()

        async def run() -> None:
            async with aclosing(other.generate(ask("long", 1900, prompt=PROMPT))) as chunks:
                async for chunk in chunks:
                    found.append(chunk)
                    begun.set()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run)
            await begun.wait()
            for version in range(first + 1, first + 5):
                await engine.load_adapter(adapters[version % 4], version, SwapMode.RECOMPUTE)
                await check_greedy(engine, adapters[version % 4], version)
    ids = ids_of(found)
    assert set(versions_of(found)) == {first}
    assert found[-1].finish_reason in (FinishReason.ABORT, FinishReason.LENGTH)  # the server may have been quicker
    told = np.concatenate([chunk.logprobs for chunk in found])
    np.testing.assert_allclose(told, logprobs(adapters[first % 4], PROMPT, ids, 1.0), atol=1e-4)


def no_numbers(tensors):
    return {name: torch.full_like(tensor, float("nan")) for name, tensor in tensors.items()}


async def test_an_adapter_that_gives_no_numbers_is_refused_and_the_old_one_serves(
    real_with_adapters, versions, adapters, tmp_path: Path
):
    kind, url = real_with_adapters
    async with http_engine(kind, "e", url, HttpEngineSettings(adapters=True)) as engine:
        version = (await engine.health()).version + 1
        await engine.load_adapter(adapters[version % 4], version, SwapMode.RECOMPUTE)
        bad = write_adapter(tmp_path / "bad", versions[0], seed=9, change=no_numbers)
        with pytest.raises(WeightsRefusedError, match=f"version {version} serves on"):
            await engine.load_adapter(bad, version + 1, SwapMode.RECOMPUTE)
        await check_greedy(engine, adapters[version % 4], version)
        await engine.load_adapter(adapters[(version + 1) % 4], version + 1, SwapMode.RECOMPUTE)
        await check_greedy(engine, adapters[(version + 1) % 4], version + 1)
