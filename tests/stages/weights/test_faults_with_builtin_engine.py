"""Damaged and wrong weights against the built-in engine: the old ones serve, a clear error, nothing dies."""

from __future__ import annotations

import shutil
from pathlib import Path

import msgspec
import numpy as np
import pytest
from safetensors.torch import load_file, save_file
from weights_case import Broadcast

from schemas.messages.engines import EngineState
from schemas.messages.training import WeightsManifest, WeightsPublished
from stages.engine.builtin import BuiltinEngineSettings, builtin_engine
from stages.policy.tiny import PolicySpec, make_policy_folder
from stages.ports import GenerateRequest, SamplingSettings
from stages.weight_files.folders import version_folder
from stages.weight_files.holds import prune

SPEC = PolicySpec(hidden_size=32, intermediate_size=32, num_layers=1, num_heads=2, num_kv_heads=1, max_context=128)


@pytest.fixture(scope="module")
def policies(tmp_path_factory) -> list[Path]:
    """Versions 0, 1 and 2."""
    root = tmp_path_factory.mktemp("policies")
    for version in range(3):
        make_policy_folder(root / f"{version}", msgspec.structs.replace(SPEC, seed=version))
    return [root / f"{version}" for version in range(3)]


async def greedy(engine, name: str, min_version: int) -> tuple[list[int], set[int]]:
    request = GenerateRequest(
        request_id=name,
        prompt_ids=np.arange(8, dtype=np.int32),
        settings=SamplingSettings(temperature=0.0, max_new_tokens=8),
        min_version=min_version,
    )
    ids: list[int] = []
    versions: set[int] = set()
    async for chunk in engine.generate(request):
        ids += chunk.token_ids.tolist()
        versions.add(chunk.version)
    return ids, versions


def _change(path: Path, change) -> None:
    save_file(change(load_file(path)), path, metadata={"format": "pt"})


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-9] ^= 64
    path.write_bytes(data)


FAULTS = {
    "truncated": (_truncate, "truncated"),
    "damaged": (_flip, "expected the checksum"),
    "wrong_shape": (
        lambda path: _change(
            path, lambda state: {**state, "model.norm.weight": state["model.norm.weight"][:31].clone()}
        ),
        "expected F32[32], found F32[31]",
    ),
    "wrong_name": (
        lambda path: _change(path, lambda state: {name.replace("norm", "nrm"): one for name, one in state.items()}),
        "is missing",
    ),
    "missing_file": (lambda path: path.unlink(), "expected a safetensors file"),
    "missing_config": (lambda path: (path.parent / "config.json").unlink(), "config.json was published"),
}


async def published(broadcast: Broadcast, policies: list[Path], version: int) -> WeightsPublished:
    shutil.copytree(policies[version], version_folder(broadcast.dir, version, 1))
    return await broadcast.announce(version)


@pytest.mark.parametrize("fault", FAULTS)
async def test_old_weights_serve_what_they_served_before(
    broadcast: Broadcast, policies: list[Path], fault: str
) -> None:
    damage, text = FAULTS[fault]
    async with builtin_engine("e", policies[0], BuiltinEngineSettings(num_slots=2)) as engine:
        receiver = broadcast.new_receiver(engine)
        assert await receiver.load(await published(broadcast, policies, 1))
        before = await greedy(engine, "before", 1)
        second = await published(broadcast, policies, 2)
        damage(Path(second.directory) / "model.safetensors")
        assert not await receiver.load(second)
        assert text in broadcast.metrics.labels["weights_error"]
        assert await greedy(engine, "after", 1) == before == (before[0], {1})
        assert ((await engine.health()).ready, receiver.state) == (True, EngineState.SERVING)


async def test_wrong_weights_that_were_published_as_such_are_refused_by_the_engine(
    broadcast: Broadcast, policies: list[Path]
) -> None:
    async with builtin_engine("e", policies[0], BuiltinEngineSettings(num_slots=2)) as engine:
        receiver = broadcast.new_receiver(engine)
        folder = Path(version_folder(broadcast.dir, 1, 1))
        shutil.copytree(policies[1], folder)
        FAULTS["wrong_shape"][0](folder / "model.safetensors")
        before = await greedy(engine, "before", 0)
        assert not await receiver.load(await broadcast.announce(1))
        assert "model.norm.weight has shape (31,), expected (32,)" in broadcast.metrics.labels["weights_error"]
        assert await greedy(engine, "after", 0) == before
        assert await receiver.load(await published(broadcast, policies, 2)), "the next version is loaded as ever"


async def test_a_lying_checksum_is_told_apart_from_the_real_one(broadcast: Broadcast, policies: list[Path]) -> None:
    async with builtin_engine("e", policies[0], BuiltinEngineSettings(num_slots=2)) as engine:
        receiver = broadcast.new_receiver(engine)
        before = await greedy(engine, "before", 0)
        first = await published(broadcast, policies, 1)
        manifest = msgspec.msgpack.decode(await broadcast.payloads.get(first.manifest), type=WeightsManifest)
        tensor = manifest.tensors[0]
        manifest.tensors[0] = type(tensor)(*(*msgspec.structs.astuple(tensor)[:-1], "f" * 16))
        lying = msgspec.structs.replace(first, manifest=await broadcast.payloads.put(msgspec.msgpack.encode(manifest)))
        assert not await receiver.load(lying)
        assert f"tensor {tensor.name}: expected the checksum {'f' * 16}" in broadcast.metrics.labels["weights_error"]
        assert await greedy(engine, "after", 0) == before


async def test_a_reader_seventy_seconds_late_loads_what_it_announced_or_the_newest(
    broadcast: Broadcast, policies: list[Path]
) -> None:
    async with builtin_engine("e", policies[0], BuiltinEngineSettings(num_slots=2)) as engine:
        receiver = broadcast.new_receiver(engine)
        first = msgspec.structs.replace(await published(broadcast, policies, 1), parts=None)
        async with receiver._folder(first):  # it has announced the version, and the trainer goes on
            broadcast.now_s += 70.0
            second = await published(broadcast, policies, 2)
            assert prune(broadcast.dir, keep_from_version=2, now=lambda: broadcast.now_s) == []
        assert await receiver.load(first)
        assert prune(broadcast.dir, keep_from_version=2, now=lambda: broadcast.now_s) == ["v0000001-g1"]
        assert await receiver.load(second)
        assert (await greedy(engine, "now", 2))[1] == {2}
