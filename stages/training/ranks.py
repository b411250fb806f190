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
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore  # torch.distributed gives them without exporting

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
def process_group(*, timeout_s: float = 300.0, start_timeout_s: float = 300.0, session: str = "") -> Generator[Ranks]:
    """The group that torchrun's environment describes (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT); gloo on CPU, NCCL on CUDA.

    Without that environment: a single rank.

    Args:
        timeout_s: of each collective.
        start_timeout_s: how long a rank waits for the others to be there.
        session: parts this group from others that meet at the same address; empty: as torchrun's agent arranged it.

    Raises:
        CollectiveError: the others did not come.
    """
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    if world_size == 1:
        yield Ranks(0, 1, device)
        return
    backend, timeout = "nccl" if on_gpu else "gloo", timedelta(seconds=timeout_s)
    if session:
        rank = int(os.environ["RANK"])
        store = _meet(rank, world_size, session, start_timeout_s)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
    else:
        dist.init_process_group(backend, timeout=timeout)
    try:
        yield Ranks(dist.get_rank(), dist.get_world_size(), device, timeout_s=timeout_s)
    finally:
        dist.destroy_process_group()


def _meet(rank: int, world_size: int, session: str, timeout_s: float) -> Store:
    """A store in which only ranks of this session see each other, once all of them are there: they may import for minutes.

    Raises:
        CollectiveError: some did not come in time.
    """
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    patience = timedelta(seconds=timeout_s)
    try:
        base = TCPStore(address, port, is_master=rank == 0, timeout=patience, wait_for_workers=False)
        store = PrefixStore(session, base)
        store.set(f"here/{rank}", "1")
        store.wait([f"here/{other}" for other in range(world_size)], patience)
    except RuntimeError as error:  # what torch raises for addresses, ports and timeouts alike
        raise CollectiveError(
            f"rank {rank} of {world_size}: expected all ranks at {address}:{port} within {timeout_s:g} s "
            f"(training.start_timeout_s): is that address rank 0's node, reachable from here, and the port free there? "
            f"Found: {str(error).strip().splitlines()[0]}"
        ) from error
    return store
