"""Low-rank adapters on Megatron-Core's divided matrices, one for each HF projection, so that they are peft's own.

Megatron fuses q, k, v and gate, up; one adapter on a fused matrix would be another model than peft's adapters on each. The wide
side of an adapter is divided as its matrix is, the side of `rank` numbers is whole: what travels between ranks is [T, R].
Shapes: T tokens of a pack, R rank, I and O this rank's widths in and out, K key heads of the rank, G query heads a key head, E head size.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, cast

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from torch import Tensor, nn

from stages.training.errors import TrainingError
from stages.training.lora import LoraSettings, initial_down
from stages.training.megatron.convert import PROJECTIONS, ROW_PARALLEL, Heads, Stage, projection_name

_QKV: Final = "self_attention.linear_qkv"


class Adapter(nn.Module):
    """One projection's."""

    def __init__(self, down_RI: Tensor, width: int, settings: LoraSettings, *, is_row_parallel: bool) -> None:
        """This rank's part.

        Args:
            down_RI: the first matrix.
            width: O, rows of the second one.
            settings: the scale, the dropout.
            is_row_parallel: inputs are divided among the ranks; else outputs.
        """
        super().__init__()
        self.lora_A = nn.Parameter(down_RI)
        self.lora_B = nn.Parameter(down_RI.new_zeros(width, settings.rank))
        self.width = width
        self._scale = settings.scale
        self._dropout = nn.Dropout(settings.dropout)
        self._is_row_parallel = is_row_parallel

    def forward(self, x_T1I: Tensor) -> Tensor:
        """What is added to the projection: [T, 1, O]."""
        small_T1R = self._dropout(x_T1I.to(self.lora_A.dtype)) @ self.lora_A.T
        if self._is_row_parallel:
            small_T1R = reduce_from_tensor_model_parallel_region(small_T1R)
        else:  # each rank's outputs give back a share of its gradient
            small_T1R = copy_to_tensor_model_parallel_region(small_T1R)
        return small_T1R @ self.lora_B.T * self._scale


class AdaptedLinear(nn.Module):
    """A frozen matrix of Megatron's with the adapters of the projections in it."""

    def __init__(
        self, base_layer: nn.Module, adapters: Mapping[str, Adapter], widths: Mapping[str, int], num_kv_heads: int
    ) -> None:
        """Stand in the matrix's place.

        Args:
            base_layer: Megatron's linear layer.
            adapters: by projection, some of those in it.
            widths: of all projections in it, in order.
            num_kv_heads: K, over which q, k and v are woven together; 0 where projections just lie one after the other.
        """
        super().__init__()
        self.base_layer = base_layer
        self.adapters = nn.ModuleDict(dict(adapters))
        self.is_on = True
        self._widths = dict(widths)
        self._num_kv_heads = num_kv_heads

    def forward(self, x_T1I: Tensor) -> tuple[Tensor, Tensor | None]:
        """As Megatron's layers: outputs and the bias that isn't added yet."""
        out_T1O, bias = self.base_layer(x_T1I)
        if self.is_on:
            out_T1O = out_T1O + self._added(x_T1I, out_T1O).to(out_T1O.dtype)
        return out_T1O, bias

    def _added(self, x_T1I: Tensor, out_T1O: Tensor) -> Tensor:
        parts = [
            self.adapters[name](x_T1I) if name in self.adapters else out_T1O.new_zeros(*out_T1O.shape[:2], width)
            for name, width in self._widths.items()
        ]
        if not self._num_kv_heads:
            return torch.cat(parts, dim=-1)
        by_head_T1KO = [part.unflatten(-1, (self._num_kv_heads, -1)) for part in parts]
        return torch.cat(by_head_T1KO, dim=-1).flatten(-2)


class Adapters:
    """Those of a rank's part of a model."""

    def __init__(
        self,
        model: GPTModel,
        settings: LoraSettings,
        stage: Stage,
        heads: Heads,
        *,
        tensor_rank: int,
        tensor_size: int,
    ) -> None:
        """Freeze the model and put adapters into it, in place.

        Raises:
            TrainingError: a target names no projection, or dropout over divided inputs.
        """
        known = [name for names in PROJECTIONS.values() for name in names]
        if unknown := [name for name in settings.targets if name not in known] or not settings.targets:
            raise TrainingError(
                f"training.lora.targets = {list(settings.targets)}: backend megatron adapts {', '.join(known)}, found {unknown}"
            )
        if settings.dropout and tensor_size > 1:
            raise TrainingError(
                f"training.lora.dropout = {settings.dropout:g}: ranks that share a matrix would drop different inputs; set it to "
                "0, or training.megatron.tensor_parallel to 1"
            )
        self._heads: Final = heads
        self._share: Final = (tensor_rank, tensor_size)
        self._adapted: Final[list[AdaptedLinear]] = []
        model.requires_grad_(requires_grad=False)
        for number, layer in enumerate(cast("Sequence[nn.Module]", cast("Any", model).decoder.layers)):
            for matrix, projections in PROJECTIONS.items():
                if chosen := [name for name in projections if name in settings.targets]:
                    self._adapt(layer, stage.first_layer + number, matrix, chosen, settings)

    @contextmanager
    def off(self) -> Generator[None]:
        """The model is what it was without adapters."""
        for one in self._adapted:
            one.is_on = False
        try:
            yield
        finally:
            for one in self._adapted:
                one.is_on = True

    def _adapt(self, layer: nn.Module, number: int, matrix: str, chosen: Sequence[str], settings: LoraSettings) -> None:
        block, name = matrix.split(".")
        parent = layer.get_submodule(block)
        base = parent.get_submodule(name)
        weight_OI = cast("Tensor", base.weight)
        rank, size = self._share
        widths = self._widths(matrix, weight_OI.shape[0])
        adapters: dict[str, Adapter] = {}
        for projection in chosen:
            is_row_parallel = projection in ROW_PARALLEL
            width = weight_OI.shape[1] * (size if is_row_parallel else 1)
            down_RI = initial_down(projection_name(number, matrix, projection), settings.rank, width)
            if is_row_parallel:
                down_RI = down_RI.chunk(size, dim=1)[rank].contiguous()
            adapters[projection] = Adapter(
                down_RI.to(weight_OI.device), widths[projection], settings, is_row_parallel=is_row_parallel
            )
        adapted = AdaptedLinear(base, adapters, widths, self._heads.num_kv_heads if matrix == _QKV else 0)
        setattr(parent, name, adapted)
        self._adapted.append(adapted)

    def _widths(self, matrix: str, total: int) -> dict[str, int]:
        if matrix == _QKV:
            small = self._heads.num_kv_heads * self._heads.head_size
            return {"q_proj": total - 2 * small, "k_proj": small, "v_proj": small}
        projections = PROJECTIONS[matrix]
        return dict.fromkeys(projections, total // len(projections))
