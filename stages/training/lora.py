"""Low-rank adapters by peft: only they are trained and saved; engines get merged weights, and the adapter beside them.

Knows HF modules and names. The adapter's keys are peft's own, so that `PeftModel.from_pretrained` and engines read it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Final, cast

import msgspec
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from stages.training.errors import TrainingError

ADAPTER_FOLDER: Final = "adapter"
_ADAPTER: Final = "default"
_PREFIX: Final = "base_model.model."


class LoraSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which matrices get an adapter, and of what rank."""

    rank: int = 16
    alpha: float = 32.0
    """The adapter's product is scaled by alpha / rank."""
    dropout: float = 0.0
    targets: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    """Names of the linear layers, as the model's modules end."""


class LoraModel:
    """A causal language model with adapters in it."""

    def __init__(self, model: nn.Module, settings: LoraSettings, base_folder: str) -> None:
        """Put adapters into `model`, in place.

        Raises:
            TrainingError: peft isn't installed, or a target names no layer.
        """
        try:
            from peft import LoraConfig, get_peft_model  # noqa: PLC0415 - only where adapters are asked for
        except ImportError as error:
            raise TrainingError("training.lora needs peft: install headrace[train]") from error
        config = LoraConfig(
            r=settings.rank,
            lora_alpha=cast("int", settings.alpha),  # peft takes any number
            lora_dropout=settings.dropout,
            target_modules=list(settings.targets),
            base_model_name_or_path=base_folder,
            task_type="CAUSAL_LM",
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)  # every rank starts from the same adapters
            try:
                self._peft: Any = get_peft_model(cast("Any", model), config)  # peft's wrapper has no precise type
            except ValueError as error:
                raise TrainingError(f"training.lora.targets = {list(settings.targets)}: {error}") from error
        self._config = config
        self._scale = settings.alpha / settings.rank

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
                weight = (weight.float() + self._scale * (up.float() @ down.float())).to(weight.dtype)
            found[name.replace(".base_layer.", ".")] = weight
        return found

    def adapter(self, state: Mapping[str, Tensor], whole: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        """The adapter alone, under peft's keys."""
        return {
            _PREFIX + name.replace(f".{_ADAPTER}.", "."): whole(tensor)
            for name, tensor in state.items()
            if ".lora_" in name
        }

    def write_adapter(self, tensors: Mapping[str, Tensor], folder: Path) -> None:
        """adapter_config.json and adapter_model.safetensors."""
        folder.mkdir(parents=True, exist_ok=True)
        self._config.save_pretrained(str(folder))
        config = folder / "adapter_config.json"
        config.write_text(json.dumps({**json.loads(config.read_text("utf-8")), "inference_mode": True}), "utf-8")
        save_file(dict(tensors), folder / "adapter_model.safetensors", metadata={"format": "pt"})
