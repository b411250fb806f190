"""Ranks in processes of their own that train steps of given lengths, or lose one of them on the way."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import socket
import time
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path

import msgspec
import numpy as np
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from training_case import backend, step_of

from schemas import arrays
from schemas.messages.training import Manifest
from stages.training.determinism import set_determinism
from stages.training.ports import RowArrays
from stages.training.ranks import process_group

HERE = Path(__file__).parent
MicroBatches = Sequence[Sequence[Sequence[Sequence[int]]]]
"""[rank][mini-batch][micro-batch] → rows."""


def step_with_lengths(number: int, num_loss_tokens: Sequence[int]) -> tuple[Manifest, dict[int, RowArrays]]:
    """A step of one mini-batch (token mean) whose rows have a first token and then so many trained ones."""
    manifest, _ = step_of(number, num_rows=len(num_loss_tokens), mini_batches=1)
    draw = np.random.default_rng(number)
    rows = {
        index: RowArrays(
            token_ids=draw.integers(0, 264, size + 1).astype(np.int32),
            loss_mask=np.arange(size + 1) > 0,
            logprobs=np.where(np.arange(size + 1) > 0, -5.5, 0.0).astype(np.float32),
            versions=np.where(np.arange(size + 1) > 0, number - 1, -1).astype(np.int32),
            turns=np.where(np.arange(size + 1) > 0, 0, -1).astype(np.int32),
        )
        for index, size in enumerate(num_loss_tokens)
    }
    return msgspec.structs.replace(
        manifest,
        loss_weight=arrays.float64(np.full(len(rows), 1 / sum(num_loss_tokens))),
        num_tokens=arrays.int32([size + 1 for size in num_loss_tokens]),
        num_loss_tokens=arrays.int32(num_loss_tokens),
    ), rows


def train_with(plan: MicroBatches, num_loss_tokens: Sequence[int], folder: Path) -> None:
    """One rank: a step under a given plan; rank 0 keeps loss, gradient norm, and the gradient that the optimizer saw."""
    seen: list[torch.Tensor] = []

    def keep(optimizer: torch.optim.Optimizer, *_: object) -> None:
        seen.append(torch.cat([p.grad.flatten() for group in optimizer.param_groups for p in group["params"]]))

    register_optimizer_step_pre_hook(keep)
    with process_group(timeout_s=60.0) as ranks:
        trainer = backend(folder, ranks)
        trainer._plan = lambda _manifest, _num_ranks: plan
        manifest, rows = step_with_lengths(1, num_loss_tokens)
        stats = trainer.train(manifest, {index: rows[index] for index in trainer.rows_needed(manifest)}).stats
        if ranks.rank == 0:
            torch.save((stats["step_loss"], stats["grad_norm"], seen[0]), folder / f"of-{ranks.world_size}.pt")


def save_with_rank_0s_lease(folder: Path) -> None:
    """One rank of a trainer that checkpoints: only rank 0 knows the lease's generation."""
    with process_group(timeout_s=60.0) as ranks:
        trainer = backend(folder, ranks)
        manifest, rows = step_of(1)
        trainer.train(manifest, {index: rows[index] for index in trainer.rows_needed(manifest)})
        trainer.save_checkpoint(1, 7 if ranks.rank == 0 else 0)
        trainer.close()


def lose_a_rank(how: str, timeout_s: float, folder: Path) -> None:
    """One rank of a group whose rank 1 dies, or stands still, after the first step."""
    with process_group(timeout_s=timeout_s) as ranks:
        trainer = backend(folder, ranks, budget=97)
        for number in (1, 2):
            manifest, rows = step_of(number)
            mine = {index: rows[index] for index in trainer.rows_needed(manifest)}
            if number == 2:
                ranks.barrier()
                started = time.monotonic()
                if ranks.rank == 1:
                    os.kill(os.getpid(), signal.SIGKILL if how == "killed" else signal.SIGSTOP)
            try:
                trainer.train(manifest, mine)
            except Exception as error:
                found = {"error": type(error).__name__, "text": str(error), "seconds": time.monotonic() - started}
                (folder / f"rank-{ranks.rank}.json").write_text(json.dumps(found), encoding="utf-8")
                raise


def lose_a_writer(how: str, timeout_s: float, folder: Path) -> None:
    """One rank of a group whose rank 1 dies, or stands still, when its part of a checkpoint is written."""
    with process_group(timeout_s=60.0) as ranks:
        trainer = backend(folder, ranks, checkpoint_timeout_s=timeout_s)
        manifest, rows = step_of(1)
        trainer.train(manifest, {index: rows[index] for index in trainer.rows_needed(manifest)})
        if ranks.rank == 1:
            trainer._writer._meet = lambda: os.kill(os.getpid(), signal.SIGKILL if how == "killed" else signal.SIGSTOP)
        started = time.monotonic()
        try:
            trainer.save_checkpoint(1, 1)
        except Exception as error:
            found = {"error": type(error).__name__, "text": str(error), "seconds": time.monotonic() - started}
            (folder / f"rank-{ranks.rank}.json").write_text(json.dumps(found), encoding="utf-8")
            raise


def start_ranks(num_ranks: int, work: Callable[[Path], None], folder: Path) -> list[BaseProcess]:
    """Ranks under the environment that torchrun would give them, forked from a process that has torch already."""
    context = _forkserver()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes = [
        context.Process(target=_rank, args=(rank, num_ranks, port, work, folder), daemon=True)
        for rank in range(num_ranks)
    ]
    for process in processes:
        process.start()
    return processes


def end_ranks(
    processes: Sequence[BaseProcess], *, deadline_s: float, lost: Sequence[BaseProcess] = ()
) -> list[int | None]:
    """Their exit codes; None for one that had to be killed. Nobody waits for the `lost` ones."""
    end = time.monotonic() + deadline_s
    codes: list[int | None] = []
    for process in processes:
        process.join(max(0.0, end - time.monotonic()))
        codes.append(process.exitcode)
    for process in (*processes, *lost):
        process.kill()
        process.join()
    return codes


def train_over(plan: MicroBatches, num_loss_tokens: Sequence[int], folder: Path) -> tuple[float, float, torch.Tensor]:
    """Loss, gradient norm and gradient of a step over as many ranks as the plan has."""
    codes = end_ranks(start_ranks(len(plan), partial(train_with, plan, num_loss_tokens), folder), deadline_s=90.0)
    assert codes == [0] * len(plan)
    return torch.load(folder / f"of-{len(plan)}.pt")


def _forkserver() -> ForkServerContext:
    """A process that has imported torch and all else once, for every rank of every test."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["ragged_ranks"])
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE), str(HERE.parents[2])])  # it does not get this process's path
    try:
        forkserver.ensure_running()
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before
    return context


def _rank(rank: int, num_ranks: int, port: int, work: Callable[[Path], None], folder: Path) -> None:
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    set_determinism(seed=0, threads=1)
    work(folder)
