"""Weights that don't fit or are damaged, given to real servers: the old version serves, the error is clear, nothing dies."""

import json
import shutil
from pathlib import Path

import anyio.to_thread
import numpy as np
import pytest
import torch
from asking import ask, collect, ids_of, versions_of
from real_servers import greedy_ids
from safetensors.torch import load_file, save_file

from stages.clients.engines import http_engine
from stages.ports import BadRequestError, SwapMode, WeightsRefusedError
from stages.weight_files.safetensors_file import check_against, read_folder

PROMPT = np.arange(30, 62, dtype=np.int32)
NORM = "model.norm.weight"
LAST_LAYER = "model.layers.1.mlp.down_proj.weight"


def truncated(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-5000])


def truncated_in_its_header(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:100])


def rewritten(change):
    def apply(folder: Path) -> None:
        state = load_file(folder / "model.safetensors")
        change(state)
        save_file(state, folder / "model.safetensors", metadata={"format": "pt"})

    return apply


def lying_about_its_sizes(folder: Path) -> None:
    file = folder / "model.safetensors"
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header[NORM]["shape"] = [32]
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])


def without_its_file(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def missing_a_shard(folder: Path) -> None:
    """Half the tensors, and an index that knows of the others."""
    state = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    half = dict(list(state.items())[: len(state) // 2])
    save_file(half, folder / "model-00001-of-00002.safetensors", metadata={"format": "pt"})
    files = {name: f"model-0000{1 if name in half else 2}-of-00002.safetensors" for name in state}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))


BAD = {
    "truncated": (truncated, "truncated"),
    "truncated header": (truncated_in_its_header, "truncated"),
    "wrong shape": (rewritten(lambda state: state.update({LAST_LAYER: torch.zeros(8, 8)})), "expected the shape"),
    "wrong name": (rewritten(lambda state: state.update({"model.nrm.weight": state.pop(NORM)})), f"{NORM} is missing"),
    "unknown tensor": (rewritten(lambda state: state.update({"extra.weight": torch.zeros(4)})), "not one of the model"),
    "wrong type": (rewritten(lambda state: state.update({NORM: state[NORM].to(torch.int32)})), "expected the type"),
    "missing tensor": (rewritten(lambda state: state.pop(LAST_LAYER)), f"{LAST_LAYER} is missing"),
    "lying sizes": (lying_about_its_sizes, "does not take"),
    "missing file": (without_its_file, "found none"),
    "missing shard": (missing_a_shard, "its index wants it"),
}


def damaged(good: str, tmp_path: Path, name: str) -> str:
    folder = tmp_path / name.replace(" ", "_")
    shutil.copytree(good, folder)
    BAD[name][0](folder)
    return str(folder)


@pytest.mark.resources
@pytest.mark.timeout(1500)
async def test_weights_that_do_not_fit_never_reach_a_server(real, versions, tmp_path):
    kind, url = real
    async with http_engine(kind, "e", url) as engine:
        before = (await engine.health()).version
        folder = versions[1]
        await engine.load_weights(folder, before + 1, SwapMode.RECOMPUTE)
        running = engine.generate(ask("running", 150, PROMPT))
        found = [await anext(running)]
        for name, (_, message) in BAD.items():
            with pytest.raises(WeightsRefusedError, match=message):
                await engine.load_weights(damaged(versions[2], tmp_path, name), before + 2, SwapMode.RECOMPUTE)
        with pytest.raises(WeightsRefusedError, match="found none"):
            await engine.load_weights(str(tmp_path / "nowhere"), before + 2, SwapMode.RECOMPUTE)
        found += [chunk async for chunk in running]
        assert versions_of(found) == [before + 1] * 150
        health = await engine.health()
        assert (health.ready, health.version) == (True, before + 1)
        greedy = await collect(engine, ask("greedy", 8, PROMPT, temperature=0.0))
        assert ids_of(greedy).tolist() == greedy_ids(folder, PROMPT, 8)
        await engine.load_weights(versions[3], before + 2, SwapMode.RECOMPUTE)
        greedy = await collect(engine, ask("greedy", 8, PROMPT, temperature=0.0))
        assert ids_of(greedy).tolist() == greedy_ids(versions[3], PROMPT, 8)


async def test_a_lying_checksum_is_found_where_the_file_is_read(versions, tmp_path):
    """The receiver compares what lies on its node with the published manifest before any engine hears of it."""
    expected = read_folder(versions[1])
    copy = tmp_path / "copy"
    shutil.copytree(versions[1], copy)
    data = bytearray((copy / "model.safetensors").read_bytes())
    data[-7] ^= 1
    (copy / "model.safetensors").write_bytes(data)
    with pytest.raises(WeightsRefusedError, match="checksum"):
        check_against(await anyio.to_thread.run_sync(read_folder, str(copy)), expected, str(copy))


@pytest.mark.resources
@pytest.mark.timeout(1500)
async def test_an_id_outside_the_vocabulary_never_reaches_a_server(real):
    """It kills SGLang."""
    kind, url = real
    async with http_engine(kind, "e", url) as engine:
        vocab_size = 264
        for bad in (vocab_size, -1, 2**31 - 1):
            with pytest.raises(BadRequestError, match="expected token ids"):
                await collect(engine, ask(prompt=[1, bad]))
        assert len(ids_of(await collect(engine, ask(prompt=[1, vocab_size - 1])))) == 12
