"""Checkpoints on disk: torch DCP folders that appear whole, name their files' checksums, and are pruned by a keep rule.

    step-0000012-g3/   checkpoint.json   position, settings' hash, every other file with size and xxh3
                       *.distcp .metadata  weights, optimizer, RNG, sharded by rank

A checkpoint is written beside its place and renamed when all ranks are done, so a kill leaves either a whole one or a part
that is never looked at. One that doesn't match its own list is passed over, and the one before it is used.
"""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import msgspec
import structlog
import xxhash
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load

from stages.training.errors import CheckpointError
from stages.training.ranks import Ranks

log = structlog.get_logger("headrace.trainer")

_RECORD: Final = "checkpoint.json"
_BLOCK_BYTES: Final = 1 << 22


class CheckpointRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What checkpoint.json says."""

    format: int = 1
    step: int
    generation: int
    num_updates: int
    """Optimizer updates so far: the position in the schedule."""
    settings_hash: str
    """Of the model and optimizer settings that the state belongs to."""
    world_size: int
    """Ranks that wrote it; any number may read it."""
    files: dict[str, tuple[int, str]]
    """name → (bytes, 64-bit xxh3)."""
    resumed_step: int | None = None
    """The step from which the incarnation that wrote it had resumed; None: not known."""


class Position(msgspec.Struct, frozen=True, kw_only=True):
    """What a checkpoint says about itself, beside its files."""

    step: int
    generation: int
    num_updates: int
    settings_hash: str
    resumed_step: int | None = None


def folders(root: Path) -> list[tuple[int, int, Path]]:
    """(step, generation, folder) of all that look whole by name, oldest step first, newest generation last."""
    found: list[tuple[int, int, Path]] = []
    for path in root.glob("step-*-g*"):
        step, _, generation = path.name.removeprefix("step-").partition("-g")
        if step.isdigit() and generation.isdigit() and (path / _RECORD).is_file():
            found.append((int(step), int(generation), path))
    return sorted(found)


def folder_name(step: int, generation: int) -> str:
    """Of a whole checkpoint."""
    return f"step-{step:07d}-g{generation}"


def part_folder(root: Path, position: Position) -> Path:
    """Where it is written."""
    return root / f".part-{folder_name(position.step, position.generation)}"


def seal(root: Path, position: Position, world_size: int) -> Path:
    """Make a part whose files are all there a checkpoint: list them, then give it its name."""
    target, part = root / folder_name(position.step, position.generation), part_folder(root, position)
    record = CheckpointRecord(
        step=position.step,
        generation=position.generation,
        num_updates=position.num_updates,
        settings_hash=position.settings_hash,
        resumed_step=position.resumed_step,
        world_size=world_size,
        files={file.name: (file.stat().st_size, _checksum(file)) for file in sorted(part.iterdir())},
    )
    _write_durably(part / _RECORD, msgspec.json.encode(record))
    shutil.rmtree(target, ignore_errors=True)
    part.replace(target)
    _sync_folder(root)
    return target


def verify(folder: Path) -> CheckpointRecord:
    """The record, after every file was compared with it.

    Raises:
        CheckpointError: Something is missing or differs.
    """
    record = read_record(folder)
    try:
        for name, (size, checksum) in record.files.items():
            file = folder / name
            if file.stat().st_size != size or _checksum(file) != checksum:
                raise CheckpointError(f"{name} is not what was written: expected {size} bytes with xxh3 {checksum}")
    except OSError as error:
        raise CheckpointError(f"{folder}: {error}") from error
    return record


def read_record(folder: Path) -> CheckpointRecord:
    """What it says about itself, unchecked.

    Raises:
        CheckpointError: It says nothing that can be read.
    """
    try:
        return msgspec.json.decode((folder / _RECORD).read_bytes(), type=CheckpointRecord)
    except (OSError, msgspec.MsgspecError) as error:
        raise CheckpointError(f"{folder}: {error}") from error


def read(folder: Path, state: dict[str, object], ranks: Ranks) -> None:
    """Fill `state`'s tensors from a checkpoint; collective.

    Raises:
        CheckpointError: It is of another model.
    """
    try:
        with single_process_is_meant():
            load(state, storage_reader=FileSystemReader(folder), no_dist=ranks.world_size == 1)
    except (CheckpointException, RuntimeError, KeyError, ValueError) as error:
        raise CheckpointError(f"{folder} can't be loaded into this model: {error}") from error


@contextmanager
def single_process_is_meant() -> Generator[None]:
    """Torch warns whenever a checkpoint has one rank."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _checksum(file: Path) -> str:
    hasher = xxhash.xxh3_64()
    with file.open("rb") as stream:
        while block := stream.read(_BLOCK_BYTES):
            hasher.update(block)
    return hasher.hexdigest()


def _write_durably(file: Path, data: bytes) -> None:
    with file.open("wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
