"""FSDP2: each parameter is split over the ranks, gathered block by block for forward and backward (`fully_shard`).

Gradients are summed, not averaged, since loss weights are global. Every forward and backward holds collectives, so all
ranks run equally many micro-batches. Tested over gloo; over NCCL it is written and was not run.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Literal, cast

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore  # torch.distributed gives it without exporting it
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor

from stages.training.errors import TrainingError
from stages.training.ranks import Ranks

DType = Literal["float32", "bfloat16"]


class Fsdp2Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How modules are split."""

    compute_dtype: DType = "float32"
    """In forward and backward; the split master copy and the optimizer keep the model's own dtype."""
    reduce_dtype: DType = "float32"
    """In which gradients are summed over the ranks."""
    reshard_after_forward: bool = True
    """Free a block's gathered parameters between forward and backward: less memory, one more gathering."""
    cpu_offload: bool = False
    """Master copy, gradients and optimizer live in host memory."""


class Fsdp2Placement:
    """Parameters split over a one-dimensional mesh of all ranks."""

    every_micro_batch = True

    def __init__(self, ranks: Ranks, settings: Fsdp2Settings) -> None:
        if not dist.is_initialized():
            raise TrainingError(
                "FSDP2 needs a process group, even of one rank: open it with process_group or lone_group"
            )
        self._ranks = ranks
        self._settings = settings
        self._mesh: DeviceMesh = init_device_mesh(ranks.device.type, (ranks.world_size,))

    def place(self, module: nn.Module, blocks: Sequence[nn.Module], *, trained: bool) -> nn.Module:
        settings = self._settings
        precision = MixedPrecisionPolicy(
            param_dtype=getattr(torch, settings.compute_dtype), reduce_dtype=getattr(torch, settings.reduce_dtype)
        )
        pinned = self._ranks.device.type == "cuda"
        offload = CPUOffloadPolicy(pin_memory=pinned) if settings.cpu_offload else OffloadPolicy()
        module.to(self._ranks.device)
        for part in (*blocks, module):
            shard = fully_shard(
                part,
                mesh=self._mesh,
                # a trained root's parameters are needed at both ends of a pass
                reshard_after_forward=not trained or (settings.reshard_after_forward and part is not module),
                mp_policy=precision,
                offload_policy=offload,
            )
            shard.set_gradient_divide_factor(1.0)
            shard.set_force_sum_reduction_for_comms(True)  # the factor alone asks gloo for an operation it lacks
        return module

    def release(self, module: nn.Module) -> None:
        for part in module.modules():
            if isinstance(part, FSDPModule):
                part.reshard()

    def sum_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Nothing: the backward pass reduced them."""

    def clip(self, parameters: Sequence[nn.Parameter], max_norm: float) -> float:
        grads = [p.grad for p in parameters if p.grad is not None]
        if not grads:
            return 0.0
        squares = torch.stack([_local(grad).float().square().sum() for grad in grads]).sum().reshape(1)
        squares = squares.to(self._ranks.device)
        self._ranks.sum(squares)
        norm = float(squares.sqrt())
        if math.isfinite(norm) and max_norm > 0 and norm > max_norm:
            for grad in grads:
                _local(grad).mul_(max_norm / (norm + _EPS))
        return norm

    def whole(self, tensor: Tensor) -> Tensor:
        if not isinstance(tensor, DTensor):
            return tensor.detach().cpu().contiguous()
        gathered = cast("DTensor", tensor.detach().to(self._ranks.device)).full_tensor()
        # the whole model once a host is enough
        return gathered.cpu().contiguous() if self._ranks.rank == 0 else torch.empty(0, dtype=tensor.dtype)


_EPS = 1e-6
"""As in the plain placement: keeps the clipped norm at or below the limit after rounding."""


def _local(tensor: Tensor) -> Tensor:
    """This rank's part."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@contextmanager
def lone_group() -> Generator[None]:
    """A process group of one rank, which FSDP2's mesh needs; nothing where there is a group already."""
    if dist.is_initialized():
        yield
        return
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()
