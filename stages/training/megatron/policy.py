"""The policy and the critic of Megatron-Core's layers, over pipeline-, data- and tensor-parallel ranks."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from torch import Tensor

from stages.training.errors import TrainingError
from stages.training.lora import (
    ADAPTER_FOLDER,
    PEFT_PREFIX,
    LoraSettings,
    add_product,
    peft_config,
    write_adapter,
)
from stages.training.megatron.adapters import Adapters
from stages.training.megatron.convert import Stage
from stages.training.megatron.forward import LogprobForward, MegatronForward, ValueForward
from stages.training.megatron.groups import Division
from stages.training.megatron.model import Shape, build_model, read_shape
from stages.training.megatron.weights import MegatronWeights

_WEIGHT = ".weight"


class MegatronPolicy(MegatronWeights):
    """A Qwen3 whose layers are divided among pipeline stages and whose matrices among tensor-parallel ranks."""

    def __init__(
        self,
        folder: str,
        division: Division,
        *,
        dtype: torch.dtype,
        device: torch.device,
        recompute: bool = False,
        lora: LoraSettings | None = None,
    ) -> None:
        """Build and fill this rank's part.

        Args:
            folder: HF folder of version 0.
            division: how the ranks share it.
            dtype: of the weights.
            device: where they lie.
            recompute: compute activations again in the backward pass.
            lora: train adapters instead of the weights.

        Raises:
            TrainingError: the model can't be divided so, its weights or the adapters' targets don't fit.
        """
        shape = read_shape(folder)
        model, stage = _part_of(shape, division, dtype, device, is_tied=shape.tie_word_embeddings, recompute=recompute)
        super().__init__(model, shape, stage, division)
        self.read(folder)
        self.network: MegatronForward = LogprobForward(model, shape).train()
        self.vocabulary = shape.vocab_size
        self.num_layers = shape.num_hidden_layers
        self.attention_width = shape.num_attention_heads * shape.head_dim
        self._lora = lora
        self.layout = "megatron" if lora is None else f"megatron, lora, alpha {lora.alpha:g}"
        self._adapters = None
        if lora is not None:
            self._config = peft_config(lora, folder)
            self._adapters = Adapters(
                model,
                lora,
                stage,
                self._heads,
                tensor_rank=division.tensor_rank,
                tensor_size=division.tensor_size,
            )
            self._saved_shapes = self.shapes_of(dict(self.trained()))
        self._shapes = self.shapes_of(self._base())

    def tensors(self) -> dict[str, Tensor]:
        parts = self._as_hf(self._base())
        if self._lora is None:
            return self.gathered(parts)
        adapters, scale = self._as_hf(dict(self.trained())), self._lora.scale
        for name, part in parts.items():
            stem = name.removesuffix(_WEIGHT)
            if (down := adapters.get(f"{stem}.lora_A.weight")) is not None:  # divided alike, so parts make parts
                parts[name] = add_product(part, down, adapters[f"{stem}.lora_B.weight"], scale)
        return self.gathered(parts)

    def shapes(self) -> dict[str, list[int]]:
        return self._shapes

    def write_extras(self, folder: Path) -> None:
        """The adapter under peft's names."""
        if self._lora is None:
            return
        found = self.gathered(self._as_hf(dict(self.trained())))
        if self._division.is_first_copy and self.stage.is_first:
            tensors = {PEFT_PREFIX + name: tensor for name, tensor in found.items()}
            write_adapter(self._config, tensors, folder / ADAPTER_FOLDER)

    def base(self) -> Callable[[], AbstractContextManager[None]] | None:
        return None if self._adapters is None else self._adapters.off


class MegatronCritic(MegatronWeights):
    """A decoder divided as the policy's, with a value head in place of the output matrix."""

    def __init__(
        self, folder: str, division: Division, *, dtype: torch.dtype, device: torch.device, recompute: bool = False
    ) -> None:
        """As the policy.

        Raises:
            TrainingError: no such model, or it can't be divided so.
        """
        try:
            shape = read_shape(folder)
        except TrainingError as error:
            raise TrainingError(f"critic model: {error}") from error
        model, stage = _part_of(shape, division, dtype, device, is_tied=False, recompute=recompute)
        network = ValueForward(model, shape)
        super().__init__(model, shape, stage, division)
        self.read(folder)
        self.network: MegatronForward = network.train()


def _part_of(
    shape: Shape, division: Division, dtype: torch.dtype, device: torch.device, *, is_tied: bool, recompute: bool
) -> tuple[GPTModel, Stage]:
    """This rank's layers, without weights yet."""
    stages = division.stages
    stage = Stage.of(stages.rank, stages.size, num_layers=shape.num_hidden_layers, is_tied=is_tied)
    model = build_model(
        shape,
        stage,
        dtype,
        device,
        tensor_parallel=division.tensor_size,
        pipeline_parallel=stages.size,
        recompute=recompute,
    )
    return model, stage
