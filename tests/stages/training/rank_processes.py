"""Ranks for tests: processes forked from one that has imported torch already, so that a group starts in a moment."""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from stages.training.determinism import set_determinism
from stages.training.ranks import Ranks

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
DEADLINE_S = 120.0


def nursery() -> Any:
    """The context whose processes are forked from the prepared one."""
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE), str(ROOT), os.environ.get("PYTHONPATH", "")])
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        [
            "torch",
            "transformers.models.qwen3.modeling_qwen3",
            "backend_case",
            "loop_case",
            "stages.training.megatron.backend",
        ]
    )
    return context


def run_ranks(world_size: int, task: Callable[..., Any], *arguments: Any, store: Path) -> list[Any]:
    """What `task(ranks, *arguments)` returns on each of `world_size` gloo ranks."""
    context = nursery()
    store.unlink(missing_ok=True)
    pipes, processes = [], []
    for rank in range(world_size):
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(
            target=_rank, args=(theirs, rank, world_size, str(store), task, arguments), daemon=True
        )
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    results, faults = [], []
    for rank, pipe in enumerate(pipes):
        try:
            is_good, value = pipe.recv() if pipe.poll(DEADLINE_S) else (False, "no answer in time")
        except EOFError:
            is_good, value = False, "died without an answer"
        results.append(value)
        if not is_good:
            faults.append(f"rank {rank}: {value}")
    for process in processes:
        if faults:
            process.kill()
        process.join(DEADLINE_S)
    assert not faults, "\n".join(faults)
    return results


def _rank(
    pipe: Connection, rank: int, world_size: int, store: str, task: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    try:
        set_determinism(seed=0, threads=1)
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(store, world_size),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=60),
        )
        value = task(Ranks(rank, world_size, torch.device("cpu")), *arguments)
        dist.destroy_process_group()
    except BaseException:  # noqa: BLE001 - told to the test, whatever it is
        pipe.send((False, traceback.format_exc()))
    else:
        pipe.send((True, value))
