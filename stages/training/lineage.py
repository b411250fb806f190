"""Which checkpoints count where several incarnations of a trainer wrote some, and which are kept.

A later generation that went on from step k supersedes what an earlier one wrote beyond k: that belongs to another line of
weights, even where the earlier one, asleep for a while, finished writing it afterwards. It says so on disk before it trains:

    fork-g3.json   generation 3 went on from this step: what generations 1 and 2 have beyond it is not gone on from
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec
import structlog

from stages.training import checkpoints
from stages.training.checkpoints import CheckpointRecord
from stages.training.errors import CheckpointError, OtherSettingsError

log = structlog.get_logger("headrace.trainer")

_ABANDONED_S: Final = 3600.0
"""A part that nobody wrote to for so long is no longer being written."""


class Fork(msgspec.Struct, frozen=True, kw_only=True):
    """Where a generation went on."""

    generation: int
    resumed_step: int


class Kept(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint with its record, not yet compared with its files."""

    folder: Path
    record: CheckpointRecord


def fork(root: Path, generation: int, resumed_step: int) -> None:
    """Say that a generation goes on from a step (0: from the start): earlier ones' later checkpoints count no more."""
    root.mkdir(parents=True, exist_ok=True)
    part = root / f".part-fork-g{generation}"
    part.write_bytes(msgspec.json.encode(Fork(generation=generation, resumed_step=resumed_step)))
    part.replace(root / f"fork-g{generation}.json")


def standing(root: Path) -> list[Kept]:
    """The checkpoints of the surviving line, oldest first."""
    found = _records(root)
    forks = _forks(root, found)
    line = [one for one in found if not any(_supersedes(later, one.record) for later in forks)]
    return sorted(line, key=lambda one: (one.record.step, one.record.generation))


def newest_whole(root: Path, settings_hash: str) -> Kept | None:
    """The newest checkpoint of the surviving line that matches its own list of files. Others are named in the log; where
    none of the line is whole, one of a superseded line is taken.

    Raises:
        OtherSettingsError: It belongs to other settings.
    """
    line = standing(root)
    names = {one.folder for one in line}
    others = sorted(
        (one for one in _records(root) if one.folder not in names),
        key=lambda one: (one.record.generation, one.record.step),
    )
    for one in [*reversed(line), *reversed(others)]:
        try:
            record = checkpoints.verify(one.folder)
        except CheckpointError as error:
            log.warning("checkpoint is damaged: using the one before it", checkpoint=one.folder.name, reason=str(error))
            continue
        if record.settings_hash != settings_hash:
            raise OtherSettingsError(
                f"{one.folder} was written with other model or optimizer settings (hash {record.settings_hash}, now "
                f"{settings_hash}): put them back, or start in another run folder"
            )
        if one.folder not in names:
            log.warning(
                "going on from a superseded trainer's checkpoint: no other is whole", checkpoint=one.folder.name
            )
        return one
    return None


def prune(root: Path, *, keep: int, keep_every_steps: int = 0) -> None:
    """Delete all but the newest `keep` steps of the surviving line and every `keep_every_steps`-th one; abandoned parts, too."""
    line = standing(root)
    newest = set(sorted({one.record.step for one in line})[-keep:])
    latest = {one.record.step: one.folder for one in line}
    for _, _, folder in checkpoints.folders(root):
        step = int(folder.name.removeprefix("step-").partition("-")[0])
        is_kept = step in newest or (keep_every_steps > 0 and step % keep_every_steps == 0)
        if latest.get(step) != folder or not is_kept:
            shutil.rmtree(folder, ignore_errors=True)
    for part in root.glob(".part-*"):
        if _untouched_s(part) > _ABANDONED_S:
            shutil.rmtree(part, ignore_errors=True)


def resumable_steps(root: Path, *, keep: int) -> Sequence[int]:
    """The newest `keep` steps of the surviving line, ascending: what the log must reach back to. Older ones are an archive."""
    return sorted({one.record.step for one in standing(root)})[-keep:]


def _records(root: Path) -> list[Kept]:
    found: list[Kept] = []
    for _, _, folder in checkpoints.folders(root):
        try:
            found.append(Kept(folder=folder, record=checkpoints.read_record(folder)))
        except CheckpointError as error:
            log.warning("checkpoint is damaged: passed over", checkpoint=folder.name, reason=str(error))
    return found


def _forks(root: Path, found: Sequence[Kept]) -> list[Fork]:
    """As said by the generations themselves, and by what they wrote."""
    forks = [
        Fork(generation=one.record.generation, resumed_step=one.record.resumed_step)
        for one in found
        if one.record.resumed_step is not None
    ]
    for path in root.glob("fork-g*.json"):
        try:
            forks.append(msgspec.json.decode(path.read_bytes(), type=Fork))
        except (OSError, msgspec.MsgspecError) as error:
            log.warning(
                "the note of where a trainer went on is damaged: passed over", note=path.name, reason=str(error)
            )
    return forks


def _supersedes(later: Fork, record: CheckpointRecord) -> bool:
    return later.generation > record.generation and later.resumed_step < record.step


def _untouched_s(part: Path) -> float:
    try:
        return time.time() - max([part.stat().st_mtime, *(file.stat().st_mtime for file in part.iterdir())])
    except OSError:
        return 0.0
