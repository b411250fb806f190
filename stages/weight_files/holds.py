"""Who reads which version's folder: announcements as files beside the folders, heeded when old versions are deleted.

    weights/v0000005-g1/        weights/.readers/<reader>   {version, generation, since}

A reader announces a version before it opens its files; each reader holds one version at most, for `hold_s` at the most,
so what is kept beyond the newest versions is bounded by the number of readers and by time. Announcing and deleting take
the same file lock: a reader that was told that its folder stands finds it standing until it lets go.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import msgspec
import structlog

from stages.weight_files.folders import versions_in

log = structlog.get_logger("headrace.weights")

READERS_FOLDER: Final = ".readers"
HOLD_S: Final = 900.0
"""How long an announcement keeps a version. A reader that needs longer goes on to the newest one."""


class Reading(msgspec.Struct, frozen=True, kw_only=True):
    """One reader's announcement."""

    version: int
    generation: int
    since_unix_s: float


def announce_reading(
    weights_dir: str, reader: str, version: int, generation: int, *, now: Callable[[], float] = time.time
) -> bool:
    """Say that `reader` is about to read a version; whether its folder stands, and will until `end_reading`.

    A folder that this node can't write announcements beside (read-only, or not mounted) is not kept for the reader.
    """
    root = Path(weights_dir)
    folder = root / f"v{version:07d}-g{generation}"
    if not folder.is_dir():
        return False
    try:
        with _locked(root):
            reading = Reading(version=version, generation=generation, since_unix_s=now())
            path = root / READERS_FOLDER / reader
            part = path.with_name(f".{reader}.{os.getpid()}")
            part.write_bytes(msgspec.json.encode(reading))
            part.replace(path)
            return folder.is_dir()
    except OSError as error:
        log.warning("weights are read without an announcement: they may be deleted meanwhile", error=str(error))
        return folder.is_dir()


def end_reading(weights_dir: str, reader: str) -> None:
    """Let go of what `reader` announced."""
    (Path(weights_dir) / READERS_FOLDER / reader).unlink(missing_ok=True)


def prune(
    weights_dir: str,
    *,
    keep_from_version: int,
    up_to_generation: int | None = None,
    hold_s: float = HOLD_S,
    now: Callable[[], float] = time.time,
) -> list[str]:
    """Delete the folders of versions below `keep_from_version` that no reader holds; what was deleted.

    Those of trainers after `up_to_generation` are left alone: whoever asks may have been superseded without knowing it.
    """
    root = Path(weights_dir)
    doomed: list[Path] = []
    with _locked(root):
        held = _held(root, hold_s, now())
        for version, generation, path in versions_in(weights_dir):
            if version >= keep_from_version or (up_to_generation is not None and generation > up_to_generation):
                continue
            readers = held.get((version, generation))
            if readers:
                log.info("an old version is kept: it is being read", version=version, readers=readers)
                continue
            away = path.with_name(f".deleted-{path.name}")
            shutil.rmtree(away, ignore_errors=True)
            path.rename(away)  # out of sight at once; deleting takes its time and needs no lock
            doomed.append(away)
    for path in doomed:
        shutil.rmtree(path, ignore_errors=True)
    return [path.name.removeprefix(".deleted-") for path in doomed]


def _held(root: Path, hold_s: float, now: float) -> dict[tuple[int, int], list[str]]:
    held: dict[tuple[int, int], list[str]] = {}
    for path in sorted((root / READERS_FOLDER).glob("[!.]*")):
        try:
            reading = msgspec.json.decode(path.read_bytes(), type=Reading)
        except (OSError, msgspec.MsgspecError) as error:
            log.warning("an announcement of a reader can't be read and holds nothing", path=str(path), error=str(error))
            continue
        age_s = now - reading.since_unix_s
        if age_s > hold_s:
            log.warning(
                "a reader held a version for too long: it is kept no longer, and the reader goes on to the newest",
                reader=path.name,
                version=reading.version,
                age_s=round(age_s),
                hold_s=hold_s,
            )
            path.unlink(missing_ok=True)
            continue
        held.setdefault((reading.version, reading.generation), []).append(path.name)
    return held


@contextmanager
def _locked(root: Path) -> Generator[None]:
    readers = root / READERS_FOLDER
    readers.mkdir(parents=True, exist_ok=True)
    with (readers / ".lock").open("a+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
