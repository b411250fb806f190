"""A full disk is told before it is full: a run neither starts nor goes on with too little free space."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Final

import anyio

from ops.run_folder import RunFolder, RunFolderError

_PERIOD_S: Final = 1.0


def check_disk(folder: RunFolder, least_bytes: int) -> None:
    """Refuse to start on a disk that is nearly full.

    Raises:
        RunFolderError: names the folder, what is free and what is needed.
    """
    text = _too_little(folder, least_bytes)
    if text:
        raise RunFolderError(text)


async def watch_disk(folder: RunFolder, least_bytes: int, fail: Callable[[str], None]) -> None:
    """Call `fail` as soon as less than a quarter of `least_bytes` is free."""
    while True:
        text = _too_little(folder, least_bytes // 4)
        if text:
            fail(f"{text}; what was acknowledged is kept: make room and start the same command again")
            return
        await anyio.sleep(_PERIOD_S)


def _too_little(folder: RunFolder, least_bytes: int) -> str:
    free = shutil.disk_usage(folder.path).free
    if free >= least_bytes:
        return ""
    return (
        f"run.dir {folder.path}: disk full: {free / 1e6:.1f} MB free, expected at least {least_bytes / 1e6:.1f} MB "
        "(run.min_free_disk_bytes)"
    )
