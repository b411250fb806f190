"""The weights of a model of Megatron-Core's layers: out of a HF folder, into checkpoints, whole again.

A checkpoint keeps weights and optimizer moments under HF names as DTensors over the (data, tensor) ranks of the stage that has
them, so that any division may read it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, cast

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from stages.training.errors import TrainingError
from stages.training.megatron.convert import (
    Heads,
    Stage,
    hf_from_megatron,
    megatron_from_hf,
    of_stage,
    pad_vocabulary,
    shard,
    sharded_dimension,
    unpad_vocabulary,
)
from stages.training.megatron.groups import Division
from stages.training.megatron.model import Shape

_MOMENTS: Final = ("exp_avg", "exp_avg_sq")
_OUTPUT: Final = "lm_head.weight"
_VALUE_HEAD: Final = "value_head."


class MegatronWeights:
    """This rank's part; every call is collective."""

    def __init__(self, model: GPTModel, shape: Shape, stage: Stage, division: Division) -> None:
        self._model: Final = model
        self._shape: Final = shape
        self.stage: Final = stage
        self._division: Final = division
        self._heads: Final = Heads(
            num_kv_heads=shape.num_key_value_heads // division.tensor_size, head_size=shape.head_dim
        )
        self._saved_shapes = self.shapes_of(dict(self.trained()))

    def saved(self) -> dict[str, Tensor]:
        return self._distributed(self._as_hf(dict(self.trained())))

    def saved_shapes(self) -> dict[str, list[int]]:
        return self._saved_shapes

    def load(self, saved: Mapping[str, Tensor]) -> None:
        self._fill(dict(self.trained()), saved)

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, object]:
        """Moments under HF names; what has none yet gets zeros."""
        state = optimizer.state
        named = dict(self.trained())
        found: dict[str, object] = {
            kind: self._distributed(
                self._as_hf({name: state[p].get(kind, torch.zeros_like(p)) for name, p in named.items()})
            )
            for kind in _MOMENTS
        }
        steps = [float(state[p].get("step", 0.0)) for p in named.values()]
        found["step"] = torch.tensor(max(steps))
        return found

    def set_optimizer_state(self, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
        named = dict(self.trained())
        for kind in _MOMENTS:
            moments = {name: torch.zeros_like(parameter) for name, parameter in named.items()}
            self._fill(moments, state[kind])
            for name, parameter in named.items():
                optimizer.state[parameter][kind] = moments[name]
        for parameter in named.values():
            optimizer.state[parameter]["step"] = state["step"].clone()

    def trained(self) -> list[tuple[str, nn.Parameter]]:
        """This rank's trained parameters by Megatron's names."""
        return [(name, p) for name, p in self._model.named_parameters() if p.requires_grad]

    def shapes_of(self, parameters: Mapping[str, Tensor]) -> dict[str, list[int]]:
        """Whole shapes by HF name, of all stages."""
        whole = self._distributed(self._as_hf(parameters))
        return self._division.stages.merged({name: [*tensor.shape] for name, tensor in whole.items()})

    def gathered(self, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """HF parts of this rank made whole, on the CPU; only rank 0 is sure to have those of all stages."""
        found: dict[str, Tensor] = {}
        for name, tensor in self._distributed(parts).items():
            whole = cast("DTensor", tensor).full_tensor()
            found[name] = unpad_vocabulary(whole, name, self._shape.vocab_size).detach().cpu().contiguous()
        return self._division.stages.collect(found) if self._division.is_first_copy else found

    def partial_parameters(self) -> set[int]:
        """Ids of those that every rank has whole and of which each computes a share of the gradient: norms of single heads."""
        return {id(p) for name, p in self.trained() if name.endswith(("q_layernorm.weight", "k_layernorm.weight"))}

    def divided_parameters(self) -> set[int]:
        """Ids of those that are divided among the tensor-parallel ranks."""
        return {id(p) for name, p in self.trained() if self._is_divided(name, p)}

    def copied_parameters(self) -> set[int]:
        """Ids of those that an earlier stage has, too: the embedding as output matrix."""
        return {id(p) for name, p in self.trained() if name == "output_layer.weight" and self.stage.has_embedding_copy}

    def tied_parameters(self) -> list[nn.Parameter]:
        """The embedding where the first and the last stage have a copy each and its gradient is the sum of both."""
        if self._division.stages.size == 1 or not self.stage.is_tied:
            return []
        names = {"embedding.word_embeddings.weight", "output_layer.weight"}
        return [p for name, p in self.trained() if name in names]

    @torch.no_grad()
    def read(self, folder: str) -> None:
        """The model's weights from a HF folder. A critic has no output matrix, and its head isn't in the folder.

        Raises:
            TrainingError: they don't fit.
        """
        files = sorted(Path(folder).glob("*.safetensors"))
        whole = {name: tensor for file in files for name, tensor in load_file(file).items()}
        targets = {name: p for name, p in self._base().items() if not name.startswith(_VALUE_HEAD)}
        if self.stage.is_tied or (self.stage.is_last and "output_layer.weight" not in targets):
            whole.pop(_OUTPUT, None)
        division = self._division
        parts = {
            name: shard(
                pad_vocabulary(tensor, name, self._shape.padded_vocabulary),
                name,
                division.tensor_rank,
                division.tensor_size,
            )
            for name, tensor in of_stage(whole, self.stage).items()
        }
        try:
            found = megatron_from_hf(parts, self._heads, self.stage)
        except KeyError as error:
            raise TrainingError(f"{folder}: weights don't fit a Qwen3: unknown {error}; use backend = fsdp2") from error
        if found.keys() != targets.keys():
            raise TrainingError(
                f"{folder}: weights don't fit a Qwen3: missing {sorted(targets.keys() - found.keys())}, "
                f"unknown {sorted(found.keys() - targets.keys())}"
            )
        for name, tensor in found.items():
            targets[name].copy_(tensor)

    def _base(self) -> dict[str, nn.Parameter]:
        """All but adapters, as if there were none."""
        return {
            name.replace(".base_layer.", "."): p
            for name, p in self._model.named_parameters()
            if ".adapters." not in name
        }

    def _as_hf(self, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        parts = hf_from_megatron(
            {name: tensor.detach() for name, tensor in parameters.items()}, self._heads, self.stage
        )
        return {name: parts[name] for name in sorted(parts)}

    def _is_divided(self, name: str, parameter: Tensor) -> bool:
        return any(sharded_dimension(hf_name) is not None for hf_name in self._as_hf({name: parameter}))

    def _distributed(self, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: self._distributed_one(name, part) for name, part in parts.items()}

    def _distributed_one(self, name: str, part: Tensor) -> Tensor:
        dimension = sharded_dimension(name)
        over_tensor = Replicate() if dimension is None else Shard(dimension)
        mesh = self._division.mesh
        return DTensor.from_local(part.contiguous(), mesh, [Replicate(), over_tensor], run_check=False).clone()

    @torch.no_grad()
    def _fill(self, targets: Mapping[str, Tensor], saved: Mapping[str, Tensor]) -> None:
        local = {name: cast("DTensor", tensor).to_local() for name, tensor in saved.items()}
        for name, tensor in megatron_from_hf(local, self._heads, self.stage).items():
            targets[name].copy_(tensor)
