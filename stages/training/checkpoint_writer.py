"""Checkpoints written beside the training: the state is copied at once, the files follow in a thread (torch DCP's async save).

One at a time: a second save waits for the first. What can't be written is raised by the next call, never lost.
"""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Generator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Final, cast

import structlog
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import async_save

from stages.training import checkpoints, lineage
from stages.training.checkpoints import Position
from stages.training.errors import CheckpointError, CollectiveError
from stages.training.ranks import Ranks

WRITE_TIMEOUT_S: Final = 600.0
log = structlog.get_logger("headrace.trainer")


class CheckpointWriter:
    """One rank's writer; all ranks make the same calls."""

    def __init__(
        self,
        root: Path,
        ranks: Ranks,
        *,
        in_background: bool,
        keep: int,
        keep_every_steps: int = 0,
        timeout_s: float = WRITE_TIMEOUT_S,
    ) -> None:
        """Args:
        root: where checkpoints lie.
        ranks: all that write.
        in_background: `save` returns before the files are written.
        keep: so many newest ones.
        keep_every_steps: and every so-many-th step's.
        timeout_s: how long a rank that has written waits for one that has not.
        """
        self._root = root
        self._ranks = ranks
        self._in_background = in_background
        self._keep = keep
        self._keep_every_steps = keep_every_steps
        # the thread's collectives need a group of their own: those of training go on meanwhile
        self._group = _own_group(timeout_s) if ranks.world_size > 1 else None
        self._timeout_s = timeout_s
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
            CollectiveError: Another rank that writes died or hangs.
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
            CollectiveError: Another rank that writes it died or hangs.
        """
        pending, self._pending = self._pending, None
        if pending is None:
            return
        try:
            pending.result()
        except CollectiveError:
            self._latest = None
            raise
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
        name = checkpoints.folder_name(position.step, position.generation)
        with self._together(f"the writing of {name}"):
            try:
                written.result()
            except CheckpointException as error:  # no Exception to Python
                raise CheckpointError(f"{name}: {error}") from error
            self._meet()
        if self._ranks.rank == 0:
            checkpoints.seal(self._root, position, self._ranks.world_size)
            lineage.prune(self._root, keep=self._keep, keep_every_steps=self._keep_every_steps)
        with self._together(f"the wait for rank 0 to seal {name}"):
            self._meet()

    def _meet(self) -> None:
        if self._group is not None:
            dist.barrier(self._group)

    @contextmanager
    def _together(self, what: str) -> Generator[None]:
        """Where several ranks write, a failure of torch's in here is another rank's that is missing."""
        if self._group is None:
            yield
            return
        with self._ranks.collective(what, timeout_s=self._timeout_s, setting="training.checkpoint_timeout_s"):
            yield


def _own_group(timeout_s: float) -> dist.ProcessGroup:
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
    if not isinstance(group, dist.ProcessGroup):
        raise CheckpointError("this rank is in no group that writes checkpoints")
    return group
