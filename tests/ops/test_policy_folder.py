"""Version 0 is known by its weight files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ops.config import RunConfig, decode_config
from ops.policy_folder import policy_folder, prepare_policy, prepared_digest, weights_digest
from ops.run_folder import RunFolder
from schemas.errors import ConfigError


def model(path: Path, **files: bytes) -> Path:
    path.mkdir()
    for name, data in {"config.json": b"{}", "tokenizer.json": b"{}", "model.safetensors": b"w", **files}.items():
        (path / name).write_bytes(data)
    return path


def test_a_digest_is_of_the_weight_files_only_by_name_and_bytes(tmp_path: Path) -> None:
    first = weights_digest(model(tmp_path / "a"))
    assert weights_digest(model(tmp_path / "b", **{"config.json": b"{ }"})) == first
    assert weights_digest(model(tmp_path / "c", **{"model.safetensors": b"x"})) != first
    assert weights_digest(model(tmp_path / "d", **{"model-2.safetensors": b""})) != first
    assert weights_digest(tmp_path) == ""


def test_preparing_a_configured_folder_keeps_its_digest_for_the_runs_start(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.create()
    assert prepared_digest(folder) == ""
    made = model(tmp_path / "a")
    config: RunConfig = decode_config(
        {"policy": {"folder": str(made)}, "streams": [{"name": "s", "stream_id": "s"}], "arena": {"url": "http://x"}}
    )
    assert prepare_policy(config, folder) == policy_folder(config, folder) == str(made)
    assert prepared_digest(folder) == weights_digest(made)


def test_a_folder_that_is_no_model_is_refused_by_what_it_lacks(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.create()
    config = decode_config(
        {
            "policy": {"folder": str(tmp_path)},
            "streams": [{"name": "s", "stream_id": "s"}],
            "arena": {"url": "http://x"},
        }
    )
    with pytest.raises(ConfigError, match=r"lacks config\.json, tokenizer\.json, model\.safetensors"):
        prepare_policy(config, folder)


def test_the_built_in_policy_is_the_same_however_many_threads_its_maker_has(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "cache"))
    folder = RunFolder(tmp_path / "run")
    folder.create()
    config = decode_config(
        {
            "policy": {"hidden_size": 16, "num_heads": 2, "warmup_max_updates": 1, "warmup_conversations": 8},
            "streams": [{"name": "reverse", "stream_id": "reverse"}],
            "arena": {"url": "local"},
        }
    )
    before, made = torch.get_num_threads(), []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            made.append(prepare_policy(config, folder))
    finally:
        torch.set_num_threads(before)
    assert made[0] == made[1]
