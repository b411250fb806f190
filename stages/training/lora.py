"""Low-rank adapters by peft: only they are trained and saved; engines get merged weights, and the adapter beside them.

Knows HF modules and names. The adapter's keys are peft's own, so that `PeftModel.from_pretrained` and engines read it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Final, cast

import msgspec
import torch
import xxhash
from safetensors.torch import save_file
from torch import Tensor, nn

from stages.training.errors import TrainingError

ADAPTER_FOLDER: Final = "adapter"
_ADAPTER: Final = "default"
PEFT_PREFIX: Final = "base_model.model."
"""Before a module's name in an adapter's file."""


class LoraSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which matrices get an adapter, and of what rank."""

    rank: int = 16
    alpha: float = 32.0
    """The adapter's product is scaled by alpha / rank."""
    dropout: float = 0.0
    targets: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    """Names of the linear layers, as the model's modules end."""

    @property
    def scale(self) -> float:
        """Of the adapter's product."""
        return self.alpha / self.rank


def peft_config(settings: LoraSettings, base_folder: str) -> Any:  # peft's LoraConfig, which is imported only here
    """Of an adapter on the model of `base_folder`.

    Raises:
        TrainingError: peft isn't installed.
    """
    try:
        from peft import LoraConfig  # noqa: PLC0415 - only where adapters are asked for
    except ImportError as error:
        raise TrainingError("training.lora needs peft: install headrace[train]") from error
    return LoraConfig(
        r=settings.rank,
        lora_alpha=cast("int", settings.alpha),  # peft takes any number
        lora_dropout=settings.dropout,
        target_modules=list(settings.targets),
        base_model_name_or_path=base_folder,
        task_type="CAUSAL_LM",
    )


def initial_down(projection: str, rank: int, width: int) -> Tensor:
    """The adapter's first matrix before training, float32 [rank, width]: uniform as in peft, and a function of the layer's HF
    name alone, so that ranks and backends start from the same numbers. The second one is 0.
    """
    numbers = torch.Generator().manual_seed(xxhash.xxh3_64_intdigest(projection.encode()) >> 1)
    return (2 * torch.rand(rank, width, generator=numbers) - 1) / math.sqrt(width)


def write_adapter(config: Any, tensors: Mapping[str, Tensor], folder: Path) -> None:  # peft's LoraConfig
    """adapter_config.json and adapter_model.safetensors, with tensors under peft's keys."""
    folder.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(str(folder))
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text("utf-8")), "inference_mode": True}), "utf-8")
    save_file(dict(tensors), folder / "adapter_model.safetensors", metadata={"format": "pt"})


def add_product(weight: Tensor, down_RI: Tensor, up_OR: Tensor, scale: float) -> Tensor:
    """A weight [O, I] with its adapter in it; computed in float32."""
    return (weight.float() + scale * (up_OR.float() @ down_RI.float())).to(weight.dtype)


class LoraModel:
    """A causal language model with adapters in it."""

    def __init__(self, model: nn.Module, settings: LoraSettings, base_folder: str) -> None:
        """Put adapters into `model`, in place.

        Raises:
            TrainingError: peft isn't installed, or a target names no layer.
        """
        self._config = peft_config(settings, base_folder)
        from peft import get_peft_model  # noqa: PLC0415 - only where adapters are asked for

        try:
            self._peft: Any = get_peft_model(cast("Any", model), self._config)  # peft's wrapper has no precise type
        except ValueError as error:
            raise TrainingError(f"training.lora.targets = {list(settings.targets)}: {error}") from error
        for name, module in model.named_modules():
            if name.endswith(f".lora_A.{_ADAPTER}") and isinstance(module, nn.Linear):
                projection = name.removesuffix(f".lora_A.{_ADAPTER}")
                down_RI = initial_down(projection, settings.rank, module.in_features)
                module.weight.data.copy_(down_RI)
        self._scale = settings.scale

    @property
    def disabled(self) -> Callable[[], AbstractContextManager[None]]:
        """A context in which the model is what it was without adapters."""
        return cast("Callable[[], AbstractContextManager[None]]", self._peft.disable_adapter)

    def merged(self, state: Mapping[str, Tensor], whole: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        """The weights of an ordinary HF folder, from the state of the model with adapters."""
        found: dict[str, Tensor] = {}
        for name, tensor in state.items():
            if ".lora_" in name:
                continue
            weight = whole(tensor)
            stem, base, leaf = name.partition(".base_layer.")
            if base and leaf == "weight":
                down, up = (whole(state[f"{stem}.lora_{part}.{_ADAPTER}.weight"]) for part in "AB")
                weight = add_product(weight, down, up, self._scale)
            found[name.replace(".base_layer.", ".")] = weight
        return found

    def adapter(self, state: Mapping[str, Tensor], whole: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        """The adapter alone, under peft's keys."""
        return {
            PEFT_PREFIX + name.replace(f".{_ADAPTER}.", "."): whole(tensor)
            for name, tensor in state.items()
            if ".lora_" in name
        }

    def write_adapter(self, tensors: Mapping[str, Tensor], folder: Path) -> None:
        """As peft reads it."""
        write_adapter(self._config, tensors, folder)
