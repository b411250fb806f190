"""HF folders: read a model for training, write one that engines can load."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Final, cast

import torch
import xxhash
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from stages.learning import attention
from stages.training.errors import TrainingError

_WEIGHTS: Final = "model.safetensors"


def read_model(folder: str | Path, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """A causal language model with packed attention, in training mode.

    Raises:
        TrainingError: The folder holds no such model.
    """
    attention.register()
    transformers_logging.disable_progress_bar()
    if not (Path(folder) / "config.json").is_file():
        raise TrainingError(f"expected a HF model folder, found no config.json in {folder}")
    try:
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, attn_implementation=attention.PACKED_ATTENTION, local_files_only=True
        )
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise TrainingError(f"{folder} can't be read as a causal language model: {error}") from error
    return cast("nn.Module", model).to(device).train()


def digest(tensors: Mapping[str, Tensor]) -> str:
    """64-bit xxh3 over all tensors' bytes in order of name, 16 hex digits."""
    hasher = xxhash.xxh3_64()
    for name in sorted(tensors):
        hasher.update(tensors[name].view(torch.uint8).numpy().data)
    return hasher.hexdigest()


def write_folder(
    tensors: Mapping[str, Tensor], source: str | Path, folder: str | Path, *, extras: Path | None = None
) -> None:
    """A HF folder with config and tokenizer of `source`, and what lies in `extras`: it appears whole or not at all, and replaces
    what was there.
    """
    target = Path(folder)
    part = target.with_name(f".part-{target.name}-{os.getpid()}")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    try:
        for file in sorted(Path(source).iterdir()):
            if file.is_file() and not file.name.endswith((".safetensors", ".bin", ".safetensors.index.json")):
                shutil.copyfile(file, part / file.name)
        if extras is not None:
            shutil.copytree(extras, part, dirs_exist_ok=True)
        save_file(dict(tensors), part / _WEIGHTS, metadata={"format": "pt"})
        (part / _WEIGHTS).chmod(0o644)
        put_folder(part, target)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def put_folder(part: Path, folder: str | Path) -> None:
    """Let a folder that is complete take the place of what is there."""
    shutil.rmtree(folder, ignore_errors=True)
    part.replace(folder)
