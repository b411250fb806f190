"""Reported faults of weight synchronisation, each with its right value."""

from __future__ import annotations

from pathlib import Path

import anyio
import msgspec
import numpy as np
import pytest
from test_receiving import FaultyEngine, ask
from weights_case import Broadcast, write_weights

from schemas.messages.engines import EngineState
from stages.engine.gate import GatedEngine
from stages.engine.scripted import ScriptedEngine
from stages.ports import EngineUnavailableError, GenerateRequest, SamplingSettings, SwapMode
from stages.training.standin import StandInBackend
from stages.weight_files.folders import version_folder
from stages.weight_files.holds import announce_reading, end_reading, prune


# prime-rl#1857: the trainer cleans up while a reader, 70 s behind, has announced a version and not yet opened it
async def test_prime_rl_1857_a_reader_seventy_seconds_behind_still_finds_its_version(
    broadcast: Broadcast, wait_until
) -> None:
    engine = FaultyEngine()
    engine.gate = anyio.Event()
    receiver = broadcast.new_receiver(engine)
    fifth = await broadcast.publish(5)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(receiver.run)
        receiver.offer(fifth)
        await wait_until(lambda: list((Path(broadcast.dir) / ".readers").glob("[!.]*")))
        for version in (6, 7):
            receiver.offer(await broadcast.publish(version))
        broadcast.now_s += 70.0
        assert prune(broadcast.dir, keep_from_version=6, now=lambda: broadcast.now_s) == []
        assert (Path(fifth.directory) / "model.safetensors").exists()
        engine.gate.set()
        await wait_until(lambda: engine.version == 7)
        tasks.cancel_scope.cancel()
    assert [version for _, version, _ in engine.loads] == [5, 7], "the newest next, nothing between"
    assert prune(broadcast.dir, keep_from_version=6, now=lambda: broadcast.now_s) == ["v0000005-g1"]


async def test_prime_rl_1857_a_reader_that_announced_too_long_ago_loses_its_version_and_goes_on_to_the_newest(
    broadcast: Broadcast,
) -> None:
    fifth, seventh = await broadcast.publish(5), await broadcast.publish(7)
    assert announce_reading(broadcast.dir, "slow", 5, 1, now=lambda: broadcast.now_s)
    late = broadcast.now_s + 901.0
    assert prune(broadcast.dir, keep_from_version=6, hold_s=900.0, now=lambda: late) == ["v0000005-g1"]
    assert not announce_reading(broadcast.dir, "slow", 5, 1)
    without_store = [msgspec.structs.replace(one, parts=None) for one in (fifth, seventh)]
    assert not await broadcast.receiver.load(without_store[0])
    assert "is not on this node" in broadcast.metrics.labels["weights_error"]
    assert await broadcast.receiver.load(without_store[1])
    assert broadcast.loads == [7]


def test_a_reader_keeps_its_own_version_only(tmp_path: Path) -> None:
    folders = {version: version_folder(str(tmp_path), version, 1) for version in (1, 2, 3, 4)}
    for version, folder in folders.items():
        write_weights(folder, version)
    assert announce_reading(str(tmp_path), "a", 1, 1)
    assert announce_reading(str(tmp_path), "a", 2, 1), "it moved on"
    assert announce_reading(str(tmp_path), "b", 3, 1)
    assert prune(str(tmp_path), keep_from_version=4, up_to_generation=0) == []
    assert prune(str(tmp_path), keep_from_version=4) == ["v0000001-g1"]
    end_reading(str(tmp_path), "a")
    end_reading(str(tmp_path), "b")
    assert prune(str(tmp_path), keep_from_version=4) == ["v0000002-g1", "v0000003-g1"]
    assert prune(str(tmp_path), keep_from_version=4) == []


# prime-rl#1857, second half: a trainer is killed while it writes version 8 and writes it again after its restart
def test_prime_rl_1857_a_version_is_seen_only_when_all_its_files_are_there(tmp_path: Path) -> None:
    weights = tmp_path / "weights"
    cut_off = weights / ".part-v0000008-g1-4711"
    write_weights(cut_off, 1, names=("shard",))
    assert not announce_reading(str(weights), "reader", 8, 1), "what a killed trainer left is no version"
    StandInBackend(str(tmp_path / "checkpoints")).export_weights(version_folder(str(weights), 8, 2))
    assert announce_reading(str(weights), "reader", 8, 2)
    assert [path.name for path in Path(version_folder(str(weights), 8, 2)).iterdir()] == ["model.safetensors"]


# vllm#57854: one of three servers fails half way through version 9; then a request to each, then version 10
async def test_vllm_57854_a_server_that_fails_half_way_is_out_until_the_next_version_mends_it(
    broadcast: Broadcast,
) -> None:
    engines = [FaultyEngine() for _ in range(3)]
    gates = [GatedEngine(engine) for engine in engines]
    receivers = [
        broadcast.new_receiver(engine, incarnation=str(i), on_state=gate.be)
        for i, (engine, gate) in enumerate(zip(engines, gates, strict=True))
    ]
    eighth = await broadcast.publish(8)
    assert [await receiver.load(eighth) for receiver in receivers] == [True] * 3
    engines[1].load_fails = True
    ninth = await broadcast.publish(9)
    assert [await receiver.load(ninth) for receiver in receivers] == [True, False, True]
    assert [(loaded.incarnation, loaded.version) for loaded in broadcast.said[3:]] == [("0", 9), ("2", 9)]
    assert [receiver.state for receiver in receivers] == [
        EngineState.SERVING,
        EngineState.QUARANTINED,
        EngineState.SERVING,
    ]
    assert [engine.version for engine in engines] == [9, 8, 9]
    for gate, engine in ((gates[0], engines[0]), (gates[2], engines[2])):
        assert await ask(gate) == [258], f"served by version {engine.version}"
    with pytest.raises(EngineUnavailableError, match="quarantined: version 9"):
        await ask(gates[1])
    engines[1].load_fails = False
    tenth = await broadcast.publish(10)
    assert [await receiver.load(tenth) for receiver in receivers] == [True] * 3
    assert {engine.version for engine in engines} == {10}
    assert [await ask(gate) for gate in gates] == [[258]] * 3


# radixark/miles#1724: a replacement server boots with the first weights while version 12 is current
async def test_miles_1724_a_replacement_answers_nothing_that_asks_for_the_current_version_before_it_has_it(
    broadcast: Broadcast,
) -> None:
    replacement = ScriptedEngine(lambda _prompt, _number: [258], keep_calls=True)
    newest = await broadcast.publish(12)
    assert (await replacement.health()).version == 0
    with pytest.raises(EngineUnavailableError, match="expected weights of version 12 or newer, serving 0"):
        await ask_at(replacement, 12)
    assert await broadcast.new_receiver(replacement).load(newest)
    assert (await replacement.health()).version == 12
    await ask_at(replacement, 12)
    assert await ask(replacement) == [258]


async def ask_at(engine: ScriptedEngine, min_version: int) -> None:
    request = GenerateRequest(
        request_id="x",
        prompt_ids=np.zeros(1, np.int32),
        settings=SamplingSettings(max_new_tokens=1),
        min_version=min_version,
    )
    async for chunk in engine.generate(request):
        assert chunk.version >= min_version


async def test_prime_rl_1857_a_load_that_was_refused_leaves_the_version_that_is_told_unchanged(
    broadcast: Broadcast,
) -> None:
    assert await broadcast.receiver.load(await broadcast.publish(1))
    second = await broadcast.publish(2)
    (Path(second.directory) / "model.safetensors").write_bytes(b"short")
    assert not await broadcast.receiver.load(second)
    assert (await broadcast.engine.health()).version == 1
    assert broadcast.receiver.state is EngineState.SERVING
    assert broadcast.engine.loads[-1][2] is SwapMode.RECOMPUTE
