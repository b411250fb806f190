"""The ranks of a trainer: collectives as plain functions, over gloo or NCCL, or none for a single process."""

from __future__ import annotations

import os
import time
from collections.abc import Generator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from stages.training.errors import CollectiveError


class Ranks:
    """This process's place among the data-parallel ranks. A single rank has no process group."""

    def __init__(self, rank: int, world_size: int, device: torch.device, *, timeout_s: float = 0.0) -> None:
        self.rank = rank
        self.world_size = world_size
        self.device = device
        self._timeout_s = timeout_s

    @contextmanager
    def collective(
        self, what: str, *, timeout_s: float | None = None, setting: str = "training.collective_timeout_s"
    ) -> Generator[None]:
        """Name a collective that fails.

        Args:
            what: the collective, in words.
            timeout_s: that of its group; None: of all ranks' group.
            setting: where it is set.

        Raises:
            CollectiveError: another rank did not take part within the timeout, or its connection ended.
        """
        started = time.monotonic()
        try:
            yield
        except RuntimeError as error:  # what torch raises for lost peers and timeouts, over gloo and NCCL alike
            raise CollectiveError(
                f"rank {self.rank} of {self.world_size}: {what} failed after {time.monotonic() - started:.1f} s (timeout "
                f"{self._timeout_s if timeout_s is None else timeout_s:g} s, {setting}): another rank died, hangs, or left the step. Look for the "
                "rank whose log ends first: its error is the cause (killed for memory, an exception). If none ended, one of them "
                f"computes for longer than the timeout. Found: {str(error).strip().splitlines()[0]}"
            ) from error

    def sum(self, tensor: Tensor) -> None:
        """Sum over the ranks, in place."""
        if self.world_size > 1:
            with self.collective(f"all_reduce of {tensor.numel()} values"):
                dist.all_reduce(tensor)

    def gather(self, values_N: Tensor) -> Tensor:
        """The 1-D values of all ranks behind each other, in order of rank; lengths may differ."""
        if self.world_size == 1:
            return values_N
        lengths = [torch.zeros(1, dtype=torch.int64, device=values_N.device) for _ in range(self.world_size)]
        with self.collective("all_gather of lengths"):
            dist.all_gather(lengths, torch.tensor([values_N.numel()], device=values_N.device))
        longest = max(int(length) for length in lengths)
        padded = torch.cat([values_N, values_N.new_zeros(longest - values_N.numel())])
        parts = [torch.empty_like(padded) for _ in range(self.world_size)]
        with self.collective(f"all_gather of {longest} values a rank"):
            dist.all_gather(parts, padded)
        return torch.cat([part[: int(length)] for part, length in zip(parts, lengths, strict=True)])

    def sum_counts(self, counts: dict[str, tuple[float, float]]) -> dict[str, tuple[float, float]]:
        """Sums of (total, count) by name over the ranks, in order of rank; names may be missing on some."""
        if self.world_size == 1:
            return counts
        everyone: list[dict[str, tuple[float, float]] | None] = [None] * self.world_size
        with self.collective("all_gather of statistics"):
            dist.all_gather_object(everyone, counts)
        summed: dict[str, tuple[float, float]] = {}
        for one in everyone:
            for name, (total, count) in (one or {}).items():
                before = summed.get(name, (0.0, 0.0))
                summed[name] = (before[0] + total, before[1] + count)
        return summed

    def agreed(self, value: int) -> int:
        """Rank 0's value, on every rank."""
        if self.world_size == 1:
            return value
        box = torch.tensor([value], dtype=torch.int64, device=self.device)
        with self.collective("broadcast of rank 0's value"):
            dist.broadcast(box, src=0)
        return int(box)

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.world_size > 1:
            with self.collective("barrier"):
                dist.barrier()


def single_rank(device: str = "cpu") -> Ranks:
    """One process, no group."""
    return Ranks(0, 1, torch.device(device))


@contextmanager
def process_group(*, timeout_s: float = 300.0) -> Generator[Ranks]:
    """The group that torchrun's environment describes (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT); gloo on CPU, NCCL on CUDA.

    Without that environment: a single rank.
    """
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    if world_size == 1:
        yield Ranks(0, 1, device)
        return
    dist.init_process_group("nccl" if on_gpu else "gloo", timeout=timedelta(seconds=timeout_s))
    try:
        yield Ranks(dist.get_rank(), dist.get_world_size(), device, timeout_s=timeout_s)
    finally:
        dist.destroy_process_group()
