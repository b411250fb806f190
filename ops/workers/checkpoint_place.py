"""Where the trainer's checkpoints lie, and whether several nodes see the same place."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

import anyio
import anyio.to_thread

from ops.config import RunConfig
from ops.run_folder import RunFolder
from schemas.errors import ConfigError

_MEET_S: Final = 30.0
_LOOK_S: Final = 0.1
_MARK: Final = ".session"


def checkpoint_folder(config: RunConfig, folder: RunFolder) -> Path:
    """Where the trainer's checkpoints lie."""
    chosen = config.training.checkpoint_dir
    return Path(chosen).absolute() / config.run.id if chosen else folder.checkpoints


async def meet_in(folder: Path, session: str, *, leads: bool, leader: str, deadline_s: float = _MEET_S) -> None:
    """See that all nodes write their checkpoints to one folder: the leading node leaves a mark, the others find it.

    Raises:
        ConfigError: it is another one here, or can't be written.
    """
    mark = folder / _MARK
    if leads:
        try:
            await anyio.to_thread.run_sync(_leave_mark, mark, session)
        except OSError as error:
            raise ConfigError(f"training.checkpoint_dir: {folder} can't be written: {error.strerror}") from error
        return
    with anyio.move_on_after(deadline_s):
        while await anyio.to_thread.run_sync(_read_mark, mark) != session:
            await anyio.sleep(_LOOK_S)
        return
    raise ConfigError(
        f"training.checkpoint_dir: {folder} is not the folder that node {leader} writes to (no mark of it came within "
        f"{deadline_s:g} s): expected one on a file system that all nodes of the trainer share"
    )


def _leave_mark(mark: Path, session: str) -> None:
    mark.parent.mkdir(parents=True, exist_ok=True)
    part = mark.with_name(f"{_MARK}.{os.getpid()}")
    part.write_text(session, encoding="ascii")
    part.replace(mark)


def _read_mark(mark: Path) -> str:
    try:
        return mark.read_text(encoding="ascii")
    except FileNotFoundError:
        return ""
