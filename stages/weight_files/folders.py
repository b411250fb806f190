"""Where versions lie on disk: one folder a version and generation, visible only when complete."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

_NAME: Final = re.compile(r"v(\d+)-g(\d+)")


def version_folder(weights_dir: str, version: int, generation: int) -> str:
    """The folder of a version."""
    return str(Path(weights_dir) / f"v{version:07d}-g{generation}")


def versions_in(weights_dir: str) -> list[tuple[int, int, Path]]:
    """(version, generation, folder) of what lies there, ascending."""
    found: list[tuple[int, int, Path]] = []
    for path in Path(weights_dir).glob("v*-g*"):
        match = _NAME.fullmatch(path.name)
        if match is not None:
            found.append((int(match[1]), int(match[2]), path))
    return sorted(found)
