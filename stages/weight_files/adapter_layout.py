"""What a LoRA adapter's folder holds (peft's files and keys), from its config and its file's header. No torch.

Shapes: a matrix is [out, in]; its adapter is B @ A with A [rank, in] and B [out, rank].
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec

from stages.ports import WeightsRefusedError
from stages.weight_files.layout import TensorShape, read_file_layout
from stages.weight_files.safetensors_file import ADAPTER_FILE_NAME

PREFIX: Final = "base_model.model."
PARTS: Final = (".lora_A.weight", ".lora_B.weight")
_FLOATS: Final = ("F32", "F16", "BF16")


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


class AdapterLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What a server was started to take."""

    max_rank: int
    max_adapters: int
    """That it computes with at once."""
    targets: frozenset[str] = frozenset()
    """Last names of the matrices that may have an adapter; empty: all."""


def read_adapter_config(folder: str | Path) -> AdapterConfig:
    """adapter_config.json of an adapter's folder.

    Raises:
        WeightsRefusedError: it is missing or damaged, or tells of a kind of adapter that isn't a plain LoRA one.
    """
    path = Path(folder) / "adapter_config.json"
    try:
        config = msgspec.json.decode(path.read_bytes(), type=AdapterConfig, strict=False)
    except (OSError, msgspec.MsgspecError) as error:
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
    return config


def adapted_matrices(names: Mapping[str, object], folder: str | Path) -> list[str]:
    """The matrices that an adapter's tensors are for, by their names without `.weight`, sorted.

    Raises:
        WeightsRefusedError: a tensor is no part of a LoRA adapter, or a matrix has only one of its two.
    """
    stems = {name.removeprefix(PREFIX).removesuffix(part) for name in names for part in PARTS if name.endswith(part)}
    wanted = {f"{PREFIX}{stem}{part}": stem for stem in stems for part in PARTS}
    for name in sorted(names.keys() - wanted.keys()):
        raise WeightsRefusedError(f"{folder}: tensor {name} is no part of a LoRA adapter")
    for name in sorted(wanted.keys() - names.keys()):
        matrix = "A" if name.endswith(PARTS[0]) else "B"
        raise WeightsRefusedError(f"{folder}: the adapter of {wanted[name]} lacks its {matrix} matrix")
    if not stems:
        raise WeightsRefusedError(f"{folder}: the adapter holds no tensor")
    return sorted(stems)


def check_adapter(folder: str | Path, base: Mapping[str, TensorShape], limits: AdapterLimits) -> None:
    """Compare an adapter with the model that it is for and with what a server takes; no data is read.

    Raises:
        WeightsRefusedError: Names the first file or tensor that is missing, damaged, or does not fit.
    """
    config = read_adapter_config(folder)
    if config.r > limits.max_rank:
        raise WeightsRefusedError(
            f"{folder}: the adapter's rank is {config.r}, the server was started for {limits.max_rank} at most: start it "
            "with a larger --max-lora-rank"
        )
    found = read_file_layout(Path(folder) / ADAPTER_FILE_NAME)
    for stem in adapted_matrices(found, folder):
        target = stem.rpartition(".")[2]
        if limits.targets and target not in limits.targets:
            raise WeightsRefusedError(
                f"{folder}: the adapter is for {stem}, the server was started for adapters of "
                f"{', '.join(sorted(limits.targets))}: name {target} in its --lora-target-modules"
            )
        weight = base.get(f"{stem}.weight")
        if weight is None or len(weight.shape) != 2:
            raise WeightsRefusedError(f"{folder}: the adapter is for {stem}, which is no matrix of the model")
        down, up = (found[f"{PREFIX}{stem}{part}"] for part in PARTS)
        want = ((config.r, weight.shape[1]), (weight.shape[0], config.r))
        have = (down.shape, up.shape)
        if have != want:
            raise WeightsRefusedError(f"{folder}: the adapter of {stem}: expected the shapes {want}, found {have}")
        for one in (down, up):
            if one.dtype not in _FLOATS:
                raise WeightsRefusedError(
                    f"{folder}: the adapter of {stem}: expected one of {', '.join(_FLOATS)}, found {one.dtype}"
                )
