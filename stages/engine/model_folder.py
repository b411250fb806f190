"""Read a HF folder for the built-in engine. Blocking: call it in a thread."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from stages.engine.adapter import merged
from stages.learning.qwen3 import ModelShape, ShapeError, Weights, check_tensors, fuse, shape_from_config
from stages.ports import WeightsRefusedError


def read_shape(folder: str | Path) -> ModelShape:
    """The model's shape from config.json.

    Raises:
        WeightsRefusedError: No such file, damaged, or no Qwen3.
    """
    path = Path(folder) / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        return shape_from_config(config)
    except (OSError, ValueError, ShapeError) as error:
        raise WeightsRefusedError(f"{path}: {error}") from error


def read_weights(folder: str | Path, shape: ModelShape, *, adapter: str | Path | None = None) -> Weights:
    """All tensors of the folder's safetensors files; names and shapes are checked from the headers before any is read.

    Args:
        adapter: folder of a LoRA adapter that is put on them.

    Raises:
        WeightsRefusedError: Files missing or damaged, tensors missing or of another shape, or numbers that are not finite.
    """
    files = sorted(Path(folder).glob("*.safetensors"))
    if not files:
        raise WeightsRefusedError(f"expected safetensors files in {folder}, found none")
    state: dict[str, torch.Tensor] = {}
    try:
        sizes: dict[str, tuple[int, ...]] = {}
        for file in files:
            with safe_open(file, framework="pt") as header:
                sizes |= {name: tuple(header.get_slice(name).get_shape()) for name in header.keys()}  # noqa: SIM118
        check_tensors(shape, sizes)
        for file in files:
            with safe_open(file, framework="pt") as tensors:
                state |= {name: tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118
        if adapter is not None:
            state = merged(state, adapter)
        weights = fuse(shape, state)
    except (OSError, SafetensorError, ShapeError) as error:
        raise WeightsRefusedError(f"{folder}: {error}") from error
    for name, tensor in state.items():
        if not bool(torch.isfinite(tensor).all()):
            raise WeightsRefusedError(f"{folder}: {name} holds numbers that are not finite")
    return weights
