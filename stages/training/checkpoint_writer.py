"""Checkpoints written beside the training: the state is copied at once, the files follow in a thread (torch DCP's async save).

One at a time: a second save waits for the first. What can't be written is raised by the next call, never lost.
"""

from __future__ import annotations

import shutil
import warnings
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import cast

import structlog
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import async_save

from stages.training import checkpoints, lineage
from stages.training.checkpoints import Position
from stages.training.errors import CheckpointError
from stages.training.ranks import Ranks

log = structlog.get_logger("headrace.trainer")


class CheckpointWriter:
    """One rank's writer; all ranks make the same calls."""

    def __init__(self, root: Path, ranks: Ranks, *, in_background: bool, keep: int, keep_every_steps: int = 0) -> None:
        self._root = root
        self._ranks = ranks
        self._in_background = in_background
        self._keep = keep
        self._keep_every_steps = keep_every_steps
        # the thread's collectives need a group of their own: those of training go on meanwhile
        self._group = _own_group() if ranks.world_size > 1 else None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None
        self._latest: Position | None = None
        # torch warns, in a thread of its own, whenever a checkpoint has one rank: process-wide is the only place to say it is meant
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")

    def save(self, state: dict[str, object], position: Position) -> None:
        """Start to write `state`; it may be changed as soon as this returns. Nothing where that checkpoint is being
        written or was written by this writer.

        Raises:
            CheckpointError: The one before couldn't be written.
        """
        self.wait()
        if self._latest == position:
            return
        part = checkpoints.part_folder(self._root, position)
        if self._ranks.rank == 0:
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir(parents=True)
        self._ranks.barrier()
        written = cast(
            "Future[object]",
            async_save(
                state,
                storage_writer=FileSystemWriter(part, sync_files=True),
                process_group=self._group,
                no_dist=self._group is None,
            ),
        )
        self._latest = position
        self._pending = self._thread.submit(self._finish, written, position)
        if not self._in_background:
            self.wait()

    def wait(self) -> None:
        """Return when nothing is being written.

        Raises:
            CheckpointError: It couldn't be.
        """
        pending, self._pending = self._pending, None
        if pending is None:
            return
        try:
            pending.result()
        except Exception as error:  # whatever failed in the thread is told here, as what it means
            self._latest = None
            raise CheckpointError(f"a checkpoint couldn't be written to {self._root}: {error}") from error

    def close(self) -> None:
        """Wait, then end the thread."""
        try:
            self.wait()
        finally:
            self._thread.shutdown()

    def _finish(self, written: Future[object], position: Position) -> None:
        written.result()
        self._meet()
        if self._ranks.rank == 0:
            checkpoints.seal(self._root, position, self._ranks.world_size)
            lineage.prune(self._root, keep=self._keep, keep_every_steps=self._keep_every_steps)
        self._meet()

    def _meet(self) -> None:
        if self._group is not None:
            dist.barrier(self._group)


def _own_group() -> dist.ProcessGroup:
    group = dist.new_group(backend="gloo")
    if not isinstance(group, dist.ProcessGroup):
        raise CheckpointError("this rank is in no group that writes checkpoints")
    return group
