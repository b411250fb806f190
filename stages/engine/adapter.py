"""Put a LoRA adapter (peft's files and keys) on the weights of a HF folder. Blocking: call it in a thread.

The product is added in float32 and rounded to the weight's type once: the numbers that the trainer's own merged export has.
Shapes: a matrix is [out, in]; its adapter B @ A with A [rank, in] and B [out, rank].
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from stages.ports import WeightsRefusedError
from stages.weight_files.safetensors_file import ADAPTER_FILE_NAME

_PREFIX: Final = "base_model.model."
_PARTS: Final = (".lora_A.weight", ".lora_B.weight")


class AdapterConfig(msgspec.Struct, frozen=True):
    """What is needed of adapter_config.json; anything that would change the arithmetic otherwise is refused."""

    r: int
    lora_alpha: float
    use_rslora: bool = False
    use_dora: bool = False
    fan_in_fan_out: bool = False
    bias: str = "none"
    rank_pattern: dict[str, int] = {}
    alpha_pattern: dict[str, float] = {}
    modules_to_save: list[str] | None = None

    @property
    def scale(self) -> float:
        """By which the product is multiplied."""
        return self.lora_alpha / (math.sqrt(self.r) if self.use_rslora else self.r)


def read_adapter(folder: str | Path) -> tuple[AdapterConfig, dict[str, torch.Tensor]]:
    """An adapter's folder.

    Raises:
        WeightsRefusedError: files missing or damaged, or a kind of adapter that isn't computed here.
    """
    path = Path(folder) / "adapter_config.json"
    try:
        config = msgspec.json.decode(path.read_bytes(), type=AdapterConfig, strict=False)
        tensors = load_file(Path(folder) / ADAPTER_FILE_NAME)
    except (OSError, SafetensorError, msgspec.MsgspecError) as error:
        raise WeightsRefusedError(f"{folder}: expected a LoRA adapter, found: {error}") from error
    strange = {
        "use_dora": config.use_dora,
        "fan_in_fan_out": config.fan_in_fan_out,
        "bias": config.bias not in ("none", ""),
        "rank_pattern": config.rank_pattern,
        "alpha_pattern": config.alpha_pattern,
        "modules_to_save": config.modules_to_save,
    }
    for name, is_strange in strange.items():
        if is_strange:
            raise WeightsRefusedError(f"{path}: {name} = {getattr(config, name)!r}: expected a plain LoRA adapter")
    if config.r < 1:
        raise WeightsRefusedError(f"{path}: r = {config.r}: expected at least 1")
    return config, tensors


def merged(state: Mapping[str, torch.Tensor], folder: str | Path) -> dict[str, torch.Tensor]:
    """The state of a model with the adapter of a folder in it.

    Raises:
        WeightsRefusedError: see `read_adapter`; or the adapter does not belong on this model.
    """
    config, tensors = read_adapter(folder)
    found = dict(state)
    stems = {
        name.removeprefix(_PREFIX).removesuffix(part) for name in tensors for part in _PARTS if name.endswith(part)
    }
    unknown = sorted(tensors.keys() - {f"{_PREFIX}{stem}{part}" for stem in stems for part in _PARTS})
    if unknown:
        raise WeightsRefusedError(f"{folder}: tensor {unknown[0]} is no part of a LoRA adapter")
    for stem in sorted(stems):
        weight = found.get(f"{stem}.weight")
        down, up = (tensors.get(f"{_PREFIX}{stem}{part}") for part in _PARTS)
        if weight is None:
            raise WeightsRefusedError(f"{folder}: the adapter is for {stem}, which the model does not have")
        if down is None or up is None:
            raise WeightsRefusedError(
                f"{folder}: the adapter of {stem} lacks its {'A' if down is None else 'B'} matrix"
            )
        want = ((config.r, weight.shape[1]), (weight.shape[0], config.r))
        have = (tuple(down.shape), tuple(up.shape))
        if have != want:
            raise WeightsRefusedError(f"{folder}: the adapter of {stem}: expected the shapes {want}, found {have}")
        found[f"{stem}.weight"] = (weight.float() + config.scale * (up.float() @ down.float())).to(weight.dtype)
    return found
