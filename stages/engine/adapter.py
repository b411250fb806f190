"""Put a LoRA adapter (peft's files and keys) on the weights of a HF folder. Blocking: call it in a thread.

The product is added in float32 and rounded to the weight's type once: the numbers that the trainer's own merged export has.
Shapes: a matrix is [out, in]; its adapter B @ A with A [rank, in] and B [out, rank].
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from stages.ports import WeightsRefusedError
from stages.weight_files.adapter_layout import PARTS, PREFIX, AdapterConfig, adapted_matrices, read_adapter_config
from stages.weight_files.safetensors_file import ADAPTER_FILE_NAME


def read_adapter(folder: str | Path) -> tuple[AdapterConfig, dict[str, torch.Tensor]]:
    """An adapter's folder.

    Raises:
        WeightsRefusedError: files missing or damaged, or a kind of adapter that isn't computed here.
    """
    config = read_adapter_config(folder)
    try:
        tensors = load_file(Path(folder) / ADAPTER_FILE_NAME)
    except (OSError, SafetensorError) as error:
        raise WeightsRefusedError(f"{folder}: expected a LoRA adapter, found: {error}") from error
    return config, tensors


def merged(state: Mapping[str, torch.Tensor], folder: str | Path) -> dict[str, torch.Tensor]:
    """The state of a model with the adapter of a folder in it.

    Raises:
        WeightsRefusedError: see `read_adapter`; or the adapter does not belong on this model.
    """
    config, tensors = read_adapter(folder)
    found = dict(state)
    for stem in adapted_matrices(tensors, folder):
        weight = found.get(f"{stem}.weight")
        if weight is None:
            raise WeightsRefusedError(f"{folder}: the adapter is for {stem}, which the model does not have")
        down, up = (tensors[f"{PREFIX}{stem}{part}"] for part in PARTS)
        want = ((config.r, weight.shape[1]), (weight.shape[0], config.r))
        have = (tuple(down.shape), tuple(up.shape))
        if have != want:
            raise WeightsRefusedError(f"{folder}: the adapter of {stem}: expected the shapes {want}, found {have}")
        found[f"{stem}.weight"] = (weight.float() + config.scale * (up.float() @ down.float())).to(weight.dtype)
    return found
