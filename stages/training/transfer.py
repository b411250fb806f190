"""Where memory-to-memory transports fit (NCCL, RDMA, CUDA IPC): the trainer's ranks hand tensors to the servers' ranks, no file between.

    trainer ── open once ──▶ every server joins a process group with the trainer
    trainer ── send(version) ──▶ servers: pause · start · tensors over the group · finish · reset prefixes · resume

Files remain the transport that every engine can catch up from: a server that joins late, or failed, loads the published
folder. What is sent this way is announced by `weights.loaded` alone, after the same probe. Knows no server's routes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import msgspec
import torch
from torch import Tensor
from torch import distributed as dist

from stages.training.errors import TrainingError


class TransferMember(msgspec.Struct, frozen=True, kw_only=True):
    """A server in the group."""

    name: str
    num_ranks: int
    """Its tensor-parallel ranks: each is one rank of the group."""


class TensorMeta(msgspec.Struct, frozen=True, kw_only=True):
    """What a server must know of a tensor before it comes."""

    name: str
    """HF name."""
    dtype: str
    """As torch writes it without the module: `bfloat16`."""
    shape: list[int]


class TransferServers(Protocol):
    """The servers' side, over whatever route they offer.

    vLLM: /init_weight_transfer_engine, /start_weight_update, /update_weights, /finish_weight_update (started with
    --weight-transfer-config '{"backend": "nccl"}'). SGLang: /init_weights_update_group, /update_weights_from_distributed.
    The calls return when every server has answered; a server that fails is left out from then on, named, and quarantined by
    its own receiver until it has loaded the published folder.
    """

    async def join(self, address: str, port: int, first_rank: Mapping[str, int], world_size: int) -> None:
        """Let each server enter the group with its ranks from `first_rank[name]` on."""
        ...

    async def begin(self, version: int) -> None:
        """Pause, and make ready for tensors."""
        ...

    async def receive(self, tensors: Sequence[TensorMeta]) -> None:
        """Take these, in this order, from rank 0 of the group."""
        ...

    async def end(self, version: int) -> None:
        """Finish, or take back what was begun; label the weights; reset prefixes; resume. Sent whatever happened before."""
        ...


def ranks_of(members: Sequence[TransferMember]) -> tuple[dict[str, int], int]:
    """Each server's first rank, and the size of the group; the trainer is rank 0."""
    first: dict[str, int] = {}
    next_rank = 1
    for member in members:
        if member.num_ranks < 1 or member.name in first:
            raise TrainingError(
                f"server {member.name}: expected a name of its own and at least one rank, found {member.num_ranks}"
            )
        first[member.name] = next_rank
        next_rank += member.num_ranks
    return first, next_rank


def batches(tensors: Mapping[str, Tensor], max_bytes: int) -> Iterator[list[str]]:
    """Names in order, cut so that a batch stays below `max_bytes`; a larger tensor goes alone."""
    batch: list[str] = []
    size = 0
    for name in sorted(tensors):
        tensor = tensors[name]
        num_bytes = tensor.numel() * tensor.element_size()
        if batch and size + num_bytes > max_bytes:
            yield batch
            batch, size = [], 0
        batch.append(name)
        size += num_bytes
    if batch:
        yield batch


def meta_of(name: str, tensor: Tensor) -> TensorMeta:
    """What a server must know of a tensor."""
    return TensorMeta(name=name, dtype=str(tensor.dtype).removeprefix("torch."), shape=list(tensor.shape))


def broadcast(
    tensors: Mapping[str, Tensor], names: Sequence[str], group: dist.ProcessGroup, device: torch.device
) -> None:
    """The trainer's part of `TransferServers.receive`: each tensor from rank 0 to all. Blocking: call it in a thread, while
    `receive` waits.

    Raises:
        TrainingError: the group has no transport for the device.
    """
    if device.type == "cuda" and not dist.is_nccl_available():
        raise TrainingError("memory-to-memory transfer from a GPU needs a torch with NCCL: publish files instead")
    for name in names:
        dist.broadcast(tensors[name].detach().to(device).contiguous(), src=0, group=group)
