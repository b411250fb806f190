"""A name for each worker of a stage that no other living worker has, and that its successor takes up after its death.

Slots are locked files in the run's folder: the kernel frees a dead worker's lock, so who lives is never guessed. On a
folder that several machines share, each machine has slots of its own and sees those of the others.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import socket
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import msgspec

_MOST: Final = 1024
"""Workers of one stage on one machine."""


class WorkerSlot(msgspec.Struct, frozen=True, kw_only=True):
    """A claimed slot."""

    name: str
    dead: tuple[str, ...]
    """Names of slots that nobody holds now: their workers are gone."""


@contextmanager
def claim_slot(folder: Path, stage: str, *, host: str | None = None) -> Generator[WorkerSlot]:
    """Hold the machine's lowest free slot of a stage as long as the context.

    Raises:
        OSError: the folder can't be written, or every slot is taken.
    """
    folder.mkdir(parents=True, exist_ok=True)
    machine = host or socket.gethostname()
    held, name = -1, ""
    for number in range(_MOST):
        name = f"{stage}.{machine}.{number}"
        held = _lock(folder / name)
        if held >= 0:
            break
    if held < 0:
        raise OSError(f"{folder}: all {_MOST} slots of {stage} on {machine} are taken")
    try:
        others = sorted(path for path in folder.glob(f"{stage}.*") if path.name != name)
        yield WorkerSlot(name=name, dead=tuple(path.name for path in others if _is_free(path)))
    finally:
        os.close(held)


@contextmanager
def hold_if_dead(folder: Path, name: str) -> Generator[bool]:
    """Keep a dead worker's slot free as long as the context: nobody takes its name up meanwhile. False: somebody has it by now."""
    held = _lock(folder / name)
    try:
        yield held >= 0
    finally:
        if held >= 0:
            os.close(held)


class OwnMark(msgspec.Struct, frozen=True, kw_only=True):
    """A file of one process that nobody follows."""

    part: str
    """Random: its own among all of the kind."""
    path: Path

    def forget(self) -> None:
        """Nothing is left that somebody would have to look for."""
        self.path.unlink(missing_ok=True)


@contextmanager
def leave_mark(folder: Path, kind: str) -> Generator[OwnMark]:
    """Hold a file of a new name as long as the context, by which others find what this process leaves behind when it is killed.

    Raises:
        OSError: the folder can't be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    part = secrets.token_hex(8)
    mark = OwnMark(part=part, path=folder / f"{kind}.{part}")
    unseen = folder / f".{kind}.{part}"
    held = _lock(unseen)
    try:
        unseen.rename(mark.path)  # nobody sees it before it is held
        yield mark
    finally:
        os.close(held)


def left_marks(folder: Path, kind: str) -> list[OwnMark]:
    """The marks of processes that are gone."""
    paths = [path for path in sorted(folder.glob(f"{kind}.*")) if _is_free(path)]
    return [OwnMark(part=path.name.removeprefix(f"{kind}."), path=path) for path in paths]


def _is_free(path: Path) -> bool:
    descriptor = _lock(path)
    if descriptor >= 0:
        os.close(descriptor)
    return descriptor >= 0


def _lock(path: Path) -> int:
    """The descriptor of the locked file, or -1 where another holds it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return -1
    return descriptor
