"""The built-in engine against the port's rules."""

import asyncio
from contextlib import aclosing

import anyio
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from schemas.messages.rollout import FinishReason
from stages.engine.builtin import BuiltinEngineSettings, builtin_engine
from stages.policy.tiny import PolicySpec, make_policy_folder
from stages.ports import (
    BadRequestError,
    ContextOverflowError,
    EngineUnavailableError,
    GenerateRequest,
    SamplingSettings,
    SwapMode,
    WeightsRefusedError,
)

SPEC = PolicySpec(hidden_size=32, intermediate_size=32, num_layers=1, num_heads=2, num_kv_heads=1, max_context=512)


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> list[str]:
    """Version 0 and version 1."""
    root = tmp_path_factory.mktemp("policies")
    found = []
    for version in range(2):
        folder = root / f"v{version}"
        make_policy_folder(
            folder, PolicySpec(**{**{f: getattr(SPEC, f) for f in SPEC.__struct_fields__}, "seed": version})
        )
        found.append(str(folder))
    return found


@pytest.fixture
def engine(folders):
    return lambda **settings: builtin_engine("e0", folders[0], BuiltinEngineSettings(**settings))


def ask(name: str = "a", n: int = 12, prompt=range(10), min_version: int = 0, **settings) -> GenerateRequest:
    return GenerateRequest(
        request_id=name,
        prompt_ids=np.array(prompt, dtype=np.int32),
        settings=SamplingSettings(max_new_tokens=n, **settings),
        min_version=min_version,
    )


async def collect(engine, request):
    async with aclosing(engine.generate(request)) as chunks:
        return [chunk async for chunk in chunks]


async def test_many_requests_share_few_slots_and_all_end(engine):
    async with engine(num_slots=3, steps_per_hop=4) as served:
        answers = await asyncio.gather(*(collect(served, ask(f"r{i}", 5 + i)) for i in range(11)))
        health = await served.health()
    for i, chunks in enumerate(answers):
        assert sum(len(chunk.token_ids) for chunk in chunks) == 5 + i
        assert [chunk.finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + [FinishReason.LENGTH]
    assert (health.num_running, health.num_waiting) == (0, 0)


async def test_a_seed_repeats_its_tokens(engine):
    async with engine() as served:
        first, second, other = [await collect(served, ask("a", seed=seed)) for seed in (4, 4, 5)]
    ids = [np.concatenate([c.token_ids for c in chunks]).tolist() for chunks in (first, second, other)]
    assert ids[0] == ids[1] != ids[2]


@pytest.mark.parametrize(
    ("request_", "error", "message"),
    [
        (ask(prompt=[]), BadRequestError, "prompt token"),
        (ask(prompt=[264]), BadRequestError, "264"),
        (ask(temperature=-1.0), BadRequestError, "temperature"),
        (ask(n=0), BadRequestError, "max_new_tokens"),
        (ask(n=503), ContextOverflowError, "512"),
        (ask(min_version=1), EngineUnavailableError, "version 1"),
    ],
)
async def test_what_cannot_be_sampled_is_refused(engine, request_, error, message):
    async with engine() as served:
        with pytest.raises(error, match=message):
            await collect(served, request_)


async def test_a_full_engine_says_so(engine):
    async with engine(num_slots=1, max_waiting=1) as served, anyio.create_task_group() as tasks:
        await served.pause()
        tasks.start_soon(collect, served, ask("a"))
        await anyio.wait_all_tasks_blocked()
        with pytest.raises(EngineUnavailableError, match="full"):
            await collect(served, ask("b"))
        with pytest.raises(BadRequestError, match="in use"):
            await collect(served, ask("a"))
        await served.resume()


async def test_an_abort_ends_running_and_waiting_requests_with_what_they_have(engine):
    async with (
        engine(num_slots=1, steps_per_hop=1) as served,
        aclosing(served.generate(ask("running", 400))) as running,
    ):
        found = [await anext(running)]
        waiting = asyncio.create_task(collect(served, ask("waiting", 400)))
        await anyio.lowlevel.checkpoint()
        await served.abort("waiting")
        assert [(len(chunk.token_ids), chunk.finish_reason) for chunk in await waiting] == [(0, FinishReason.ABORT)]
        await served.abort("running")
        found += [chunk async for chunk in running]
        await served.abort("nobody")
    assert found[-1].finish_reason is FinishReason.ABORT
    assert 0 < sum(len(chunk.token_ids) for chunk in found) < 400


async def test_closing_the_iterator_frees_the_slot(engine):
    async with engine(num_slots=1, steps_per_hop=1) as served:
        async with aclosing(served.generate(ask("a", 480))) as chunks:
            await anext(chunks)
        assert len(await collect(served, ask("b", 1))) == 1


@pytest.mark.parametrize("mode", [SwapMode.IN_PLACE, SwapMode.RECOMPUTE])
async def test_a_running_request_goes_on_across_a_swap_and_says_which_version_sampled_what(engine, folders, mode):
    async with engine(steps_per_hop=1) as served:
        async with aclosing(served.generate(ask("a", 300))) as chunks:
            found = [await anext(chunks)]
            await served.load_weights(folders[1], 1, mode)
            found += [chunk async for chunk in chunks]
        assert (await served.health()).version == 1
    versions = [chunk.version for chunk in found]
    assert versions == sorted(versions)
    assert set(versions) == {0, 1}
    assert sum(len(chunk.token_ids) for chunk in found) == 300


async def test_abort_mode_ends_running_requests_and_drain_mode_lets_them_end(engine, folders):
    for mode, reason in ((SwapMode.ABORT, FinishReason.ABORT), (SwapMode.DRAIN, FinishReason.LENGTH)):
        async with engine(steps_per_hop=1) as served:
            async with aclosing(served.generate(ask("a", 60))) as chunks:
                found = [await anext(chunks)]
                await served.load_weights(folders[1], 1, mode)
                found += [chunk async for chunk in chunks]
            assert found[-1].finish_reason is reason
            assert {chunk.version for chunk in found if len(chunk.token_ids)} == {0}


async def test_a_drain_that_takes_too_long_fails_and_the_old_weights_serve_on(engine, folders):
    async with engine(swap_timeout_s=0.05, steps_per_hop=1) as served:
        async with aclosing(served.generate(ask("a", 400))) as chunks:
            await anext(chunks)
            await served.pause()
            with pytest.raises(WeightsRefusedError, match="version 1 is not loaded"):
                await served.load_weights(folders[1], 1, SwapMode.DRAIN)
            await served.resume()
            assert {chunk.version async for chunk in chunks} == {0}
        assert (await served.health()).version == 0


async def test_weights_that_do_not_fit_are_refused_and_the_old_ones_serve_on(engine, folders, tmp_path):
    state = load_file(f"{folders[1]}/model.safetensors")
    whole = await anyio.Path(folders[1], "model.safetensors").read_bytes()
    cases = {
        "missing": {n: t for n, t in state.items() if "norm" not in n},
        "shape": {**state, "model.norm.weight": torch.zeros(5)},
        "finite": {**state, "model.norm.weight": torch.full((32,), float("nan"))},
    }
    async with engine() as served:
        before = await collect(served, ask("a", 6, seed=3))
        for message, tensors in cases.items():
            folder = tmp_path / message
            folder.mkdir()
            save_file(tensors, folder / "model.safetensors")
            with pytest.raises(WeightsRefusedError, match=message):
                await served.load_weights(str(folder), 1, SwapMode.RECOMPUTE)
        torn = tmp_path / "torn"
        torn.mkdir()
        (torn / "model.safetensors").write_bytes(whole[:-100])
        with pytest.raises(WeightsRefusedError):
            await served.load_weights(str(torn), 1, SwapMode.RECOMPUTE)
        with pytest.raises(WeightsRefusedError, match="found none"):
            await served.load_weights(str(tmp_path), 1, SwapMode.RECOMPUTE)
        after = await collect(served, ask("a", 6, seed=3))
        assert (await served.health()).version == 0
    assert [c.token_ids.tolist() for c in before] == [c.token_ids.tolist() for c in after]


async def test_callers_hear_of_the_engines_end(engine):
    stack = engine()
    served = await stack.__aenter__()
    await served.pause()
    task = asyncio.create_task(collect(served, ask("a")))
    await anyio.wait_all_tasks_blocked()
    await stack.__aexit__(None, None, None)
    with pytest.raises(EngineUnavailableError, match="shut down"):
        await task
