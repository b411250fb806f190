"""Policy and placement over pipeline-, data- and tensor-parallel ranks.

A checkpoint keeps weights and optimizer moments under HF names as DTensors over the (data, tensor) ranks of the stage that has
them, so that any division may read it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, cast

import msgspec
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from stages.learning.update import sum_gradients
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
from stages.training.megatron.model import MegatronForward, Shape, build_model
from stages.training.megatron.pipeline import Stages
from stages.training.ranks import Ranks

_MOMENTS = ("exp_avg", "exp_avg_sq")


class GroupRanks(Ranks):
    """The ranks of one process group among several."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        super().__init__(group.rank(), group.size(), device)
        self.group = group

    def sum(self, tensor: Tensor) -> None:
        if self.world_size > 1:
            dist.all_reduce(tensor, group=self.group)

    def gather(self, values_N: Tensor) -> Tensor:
        if self.world_size == 1:
            return values_N
        everyone: list[Any] = [None] * self.world_size  # torch fills in whatever each rank gave
        dist.all_gather_object(everyone, values_N.cpu(), group=self.group)
        return torch.cat([cast("Tensor", one) for one in everyone]).to(values_N.device)

    def sum_counts(self, counts: dict[str, tuple[float, float]]) -> dict[str, tuple[float, float]]:
        if self.world_size == 1:
            return counts
        everyone: list[Any] = [None] * self.world_size
        dist.all_gather_object(everyone, counts, group=self.group)
        summed: dict[str, tuple[float, float]] = {}
        for one in cast("list[dict[str, tuple[float, float]]]", everyone):
            for name, (total, count) in one.items():
                before = summed.get(name, (0.0, 0.0))
                summed[name] = (before[0] + total, before[1] + count)
        return summed

    def barrier(self) -> None:
        if self.world_size > 1:
            dist.barrier(self.group)


class Groups(msgspec.Struct, frozen=True, kw_only=True):
    """The groups that this rank is in."""

    data: GroupRanks
    """The same part of the model, other rows."""
    tensor: GroupRanks
    """Parts of the same layers, the same rows."""
    stages: GroupRanks
    """Other layers, the same rows."""
    ends: GroupRanks | None
    """First and last stage, on one of them."""


def read_shape(folder: str) -> Shape:
    """Of a HF folder.

    Raises:
        TrainingError: no config.json of a Qwen3.
    """
    try:
        return msgspec.json.decode((Path(folder) / "config.json").read_bytes(), type=Shape)
    except (OSError, msgspec.MsgspecError) as error:
        raise TrainingError(f"{folder}: expected the config.json of a Qwen3: {error}") from error


class MegatronPolicy:
    """A Qwen3 whose layers are divided among pipeline stages and whose matrices among tensor-parallel ranks."""

    layout = "megatron"

    def __init__(
        self, folder: str, mesh: DeviceMesh, stages: Stages, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Build this rank's part.

        Args:
            folder: HF folder of version 0.
            mesh: (pipeline, data, tensor).
            stages: this rank's pipeline.
            dtype: of the weights.
            device: where they lie.

        Raises:
            TrainingError: the model can't be divided so, or its weights don't fit.
        """
        self._mesh = mesh["data", "tensor"]
        self._stages = stages
        self._is_first_copy = mesh.get_local_rank("data") == mesh.get_local_rank("tensor") == 0
        self._tensor_rank = mesh.get_local_rank("tensor")
        self._tensor_size = mesh["tensor"].size()
        shape = self._shape = read_shape(folder)
        self.stage = Stage.of(
            stages.rank, stages.size, num_layers=shape.num_hidden_layers, is_tied=shape.tie_word_embeddings
        )
        self._model = build_model(
            shape, self.stage, dtype, device, tensor_parallel=self._tensor_size, pipeline_parallel=stages.size
        )
        self._heads = Heads(num_kv_heads=shape.num_key_value_heads // self._tensor_size, head_size=shape.head_dim)
        self.network: MegatronForward = MegatronForward(self._model, shape).train()
        self.vocabulary = shape.vocab_size
        self.num_layers = shape.num_hidden_layers
        self.attention_width = shape.num_attention_heads * shape.head_dim
        self._read(folder)
        self._shapes = stages.merged({name: [*tensor.shape] for name, tensor in self.saved().items()})

    def tensors(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for name, tensor in self.saved().items():
            whole = cast("DTensor", tensor).full_tensor()
            found[name] = unpad_vocabulary(whole, name, self.vocabulary).detach().cpu().contiguous()
        return self._stages.collect(found) if self._is_first_copy else found

    def shapes(self) -> dict[str, list[int]]:
        return self._shapes

    def saved_shapes(self) -> dict[str, list[int]]:
        return self._shapes

    def saved(self) -> dict[str, Tensor]:
        return self._as_hf(dict(self._named()))

    def load(self, saved: Mapping[str, Tensor]) -> None:
        self._fill(dict(self._named()), saved)

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, object]:
        """Moments under HF names; what has none yet gets zeros."""
        state = optimizer.state
        named = dict(self._named())
        found: dict[str, object] = {
            kind: self._as_hf({name: state[p].get(kind, torch.zeros_like(p)) for name, p in named.items()})
            for kind in _MOMENTS
        }
        steps = [float(state[p].get("step", 0.0)) for p in named.values()]
        found["step"] = torch.tensor(max(steps))
        return found

    def set_optimizer_state(self, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
        named = dict(self._named())
        for kind in _MOMENTS:
            moments = {name: torch.zeros_like(parameter) for name, parameter in named.items()}
            self._fill(moments, state[kind])
            for name, parameter in named.items():
                optimizer.state[parameter][kind] = moments[name]
        for parameter in named.values():
            optimizer.state[parameter]["step"] = state["step"].clone()

    def write_extras(self, folder: Path) -> None:
        """Nothing beside the weights."""

    def base(self) -> Callable[[], AbstractContextManager[None]] | None:
        return None

    def partial_parameters(self) -> set[int]:
        """Ids of those that every rank has whole and of which each computes a share of the gradient: norms of single heads."""
        return {id(p) for name, p in self._named() if name.endswith(("q_layernorm.weight", "k_layernorm.weight"))}

    def divided_parameters(self) -> set[int]:
        """Ids of those that are divided among the tensor-parallel ranks."""
        return {id(p) for name, p in self._named() if "layernorm" not in name}

    def copied_parameters(self) -> set[int]:
        """Ids of those that an earlier stage has, too: the embedding as output matrix."""
        return {id(p) for name, p in self._named() if name == "output_layer.weight" and self.stage.has_embedding_copy}

    def tied_parameters(self) -> list[nn.Parameter]:
        """The embedding where the first and the last stage have a copy each and its gradient is the sum of both."""
        if self._stages.size == 1 or not self.stage.is_tied:
            return []
        names = {"embedding.word_embeddings.weight", "output_layer.weight"}
        return [p for name, p in self._named() if name in names]

    def _named(self) -> list[tuple[str, nn.Parameter]]:
        return [(name, p) for name, p in self._model.named_parameters() if p.requires_grad]

    def _as_hf(self, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        parts = hf_from_megatron(
            {name: tensor.detach() for name, tensor in parameters.items()}, self._heads, self.stage
        )
        return {name: self._distributed(name, part) for name, part in sorted(parts.items())}

    def _distributed(self, name: str, part: Tensor) -> Tensor:
        dimension = sharded_dimension(name)
        over_tensor = Replicate() if dimension is None else Shard(dimension)
        return DTensor.from_local(part.contiguous(), self._mesh, [Replicate(), over_tensor], run_check=False).clone()

    @torch.no_grad()
    def _fill(self, targets: Mapping[str, Tensor], saved: Mapping[str, Tensor]) -> None:
        local = {name: cast("DTensor", tensor).to_local() for name, tensor in saved.items()}
        for name, tensor in megatron_from_hf(local, self._heads, self.stage).items():
            targets[name].copy_(tensor)

    @torch.no_grad()
    def _read(self, folder: str) -> None:
        files = sorted(Path(folder).glob("*.safetensors"))
        whole = {name: tensor for file in files for name, tensor in load_file(file).items()}
        if self._shape.tie_word_embeddings:
            whole.pop("lm_head.weight", None)
        rank, size = self._tensor_rank, self._tensor_size
        parts = {
            name: shard(pad_vocabulary(tensor, name, self._shape.padded_vocabulary), name, rank, size)
            for name, tensor in of_stage(whole, self.stage).items()
        }
        named = dict(self._named())
        found = megatron_from_hf(parts, self._heads, self.stage)
        if found.keys() != named.keys():
            raise TrainingError(
                f"{folder}: weights don't fit a Qwen3: missing {sorted(named.keys() - found.keys())}, "
                f"unknown {sorted(found.keys() - named.keys())}"
            )
        for name, tensor in found.items():
            named[name].copy_(tensor)


class MegatronPlacement:
    """Gradients over the data-parallel ranks, norms over the tensor-parallel ones and the stages. Other models are whole on every
    rank.
    """

    def __init__(self, device: torch.device, groups: Groups, policy: MegatronPolicy) -> None:
        self._device = device
        self._data = groups.data
        self._tensor = groups.tensor
        self._stages = groups.stages
        self._ends = groups.ends
        self._tied = policy.tied_parameters()
        self._copied = policy.copied_parameters()
        self._partial = policy.partial_parameters()
        self._divided = policy.divided_parameters()

    @property
    def every_micro_batch(self) -> bool:
        """The stages of a pipeline wait for each other's states."""
        return self._stages.world_size > 1

    def place(self, module: nn.Module, blocks: Sequence[nn.Module], *, trained: bool) -> nn.Module:
        del blocks, trained
        return module.to(self._device)

    def release(self, module: nn.Module) -> None:
        """Nothing was gathered."""

    def sum_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        shares = [p for p in parameters if id(p) in self._partial]
        if self._tensor.world_size > 1:
            sum_gradients(shares, self._tensor.sum)
        if self._data.world_size > 1:
            sum_gradients(parameters, self._data.sum)
        if self._tied and self._ends is not None:
            sum_gradients(self._tied, self._ends.sum)

    def clip(self, parameters: Sequence[nn.Parameter], max_norm: float) -> float:
        squares = torch.zeros(2, device=self._device)
        with_gradient = [(p, p.grad) for p in parameters if p.grad is not None]
        for parameter, grad in with_gradient:
            if id(parameter) in self._copied:  # counted where it lies first
                continue
            squares[int(id(parameter) in self._divided)] += grad.float().square().sum()
        divided = squares[1:].clone()
        self._tensor.sum(divided)
        total = squares[:1] + divided
        self._stages.sum(total)
        norm = float(total[0].sqrt())
        if math.isfinite(norm) and max_norm > 0 and norm > max_norm:
            for _, grad in with_gradient:
                grad.mul_(max_norm / (norm + 1e-6))
        return norm

    def whole(self, tensor: Tensor) -> Tensor:
        return tensor.detach().cpu().contiguous()
