"""The process groups that a rank of the Megatron-Core backend is in."""

from __future__ import annotations

from typing import Any, cast

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from stages.training.megatron.pipeline import Stages
from stages.training.ranks import Ranks


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


class Division:
    """How the ranks share a model, and which of them this one is."""

    def __init__(self, mesh: DeviceMesh, stages: Stages) -> None:
        """Take the groups' places.

        Args:
            mesh: (pipeline, data, tensor).
            stages: this rank's pipeline.
        """
        self.mesh = mesh["data", "tensor"]
        self.stages = stages
        self.tensor_rank = mesh.get_local_rank("tensor")
        self.tensor_size = mesh["tensor"].size()
        self.is_first_copy = mesh.get_local_rank("data") == self.tensor_rank == 0
        """Among the ranks that have this stage."""
