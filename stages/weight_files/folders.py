"""Where versions lie on disk: one folder a version and generation, visible only when complete."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Final

_NAME: Final = re.compile(r"v(\d+)-g(\d+)")


def version_folder(weights_dir: str, version: int, generation: int) -> str:
    """The folder of a version."""
    return str(Path(weights_dir) / f"v{version:07d}-g{generation}")


def prune(weights_dir: str, *, keep_from_version: int) -> list[str]:
    """Delete the folders of versions below `keep_from_version`; what was deleted."""
    deleted: list[str] = []
    for path in sorted(Path(weights_dir).glob("v*-g*")):
        match = _NAME.fullmatch(path.name)
        if match is not None and int(match[1]) < keep_from_version:
            shutil.rmtree(path, ignore_errors=True)
            deleted.append(path.name)
    return deleted
