"""The scripted engine keeps the port's rules."""

from contextlib import aclosing

import numpy as np
import pytest

from schemas.messages.rollout import FinishReason
from stages.engine.scripted import ScriptedEngine
from stages.ports import (
    ContextOverflowError,
    EngineUnavailableError,
    GenerateRequest,
    SamplingSettings,
    SwapMode,
    WeightsRefusedError,
)


def ask(n: int = 10, **fields) -> GenerateRequest:
    settings = SamplingSettings(max_new_tokens=n, stop_token_ids=(9,))
    return GenerateRequest(request_id="a", prompt_ids=np.array([1, 2, 3], dtype=np.int32), settings=settings, **fields)


async def play(engine: ScriptedEngine, request: GenerateRequest):
    async with aclosing(engine.generate(request)) as chunks:
        found = [chunk async for chunk in chunks]
    return np.concatenate([chunk.token_ids for chunk in found]).tolist(), found


async def test_it_reverses_its_prompt_and_ends_as_the_script_says():
    engine = ScriptedEngine(lambda prompt, _: [*prompt[::-1].tolist(), 9, 7], chunk_tokens=2)
    ids, chunks = await play(engine, ask())
    assert ids == [3, 2, 1, 9]
    assert (chunks[-1].finish_reason, chunks[-1].stop_reason) == (FinishReason.STOP, 9)
    ids, chunks = await play(engine, ask(2))
    assert (ids, chunks[-1].finish_reason) == ([3, 2], FinishReason.LENGTH)


async def test_it_checks_requests_as_any_engine():
    engine = ScriptedEngine(lambda _, __: [9], max_context=8)
    with pytest.raises(ContextOverflowError):
        await play(engine, ask(6))
    with pytest.raises(EngineUnavailableError, match="version 2"):
        await play(engine, ask(2, min_version=2))
    engine.failing = "on fire"
    with pytest.raises(EngineUnavailableError, match="on fire"):
        await play(engine, ask(2))
    assert not (await engine.health()).ready


async def test_aborts_and_new_weights_act_between_chunks(tmp_path):
    engine = ScriptedEngine(lambda _, __: [1, 2, 3, 4, 9], chunk_tokens=1)
    async with aclosing(engine.generate(ask())) as chunks:
        found = [await anext(chunks)]
        await engine.load_weights(str(tmp_path), 3, SwapMode.IN_PLACE)
        found.append(await anext(chunks))
        await engine.abort("a")
        found += [chunk async for chunk in chunks]
    assert [chunk.version for chunk in found] == [0, 3, 3]
    assert found[-1].finish_reason is FinishReason.ABORT
    with pytest.raises(WeightsRefusedError):
        await engine.load_weights(str(tmp_path / "nowhere"), 4, SwapMode.IN_PLACE)
