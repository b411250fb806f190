"""LoRA adapters in peft's files and keys for the models of these tests."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file

from stages.weight_files.layout import read_layout

RANK = 8
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
Tensors = dict[str, torch.Tensor]


def write_adapter(
    folder: Path, model: str, *, seed: int, change: Callable[[Tensors], Tensors] | None = None, **config
) -> str:
    """An adapter for every projection of a model, large enough to change what is sampled."""
    generator = torch.Generator().manual_seed(seed)
    tensors: Tensors = {}
    for name, one in sorted(read_layout(model).items()):
        if name.removesuffix(".weight").rpartition(".")[2] not in TARGETS:
            continue
        stem = "base_model.model." + name.removesuffix(".weight")
        num_out, num_in = one.shape
        tensors[f"{stem}.lora_A.weight"] = 0.15 * torch.randn(RANK, num_in, generator=generator)
        tensors[f"{stem}.lora_B.weight"] = 0.15 * torch.randn(num_out, RANK, generator=generator)
    folder.mkdir(parents=True)
    save_file(change(tensors) if change else tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    told = {"peft_type": "LORA", "r": RANK, "lora_alpha": 16, "target_modules": list(TARGETS), "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(told | {"base_model_name_or_path": model} | config))
    return str(folder)
