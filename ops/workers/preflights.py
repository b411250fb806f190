"""What killed preflights left registered in an Arena: each marks itself in the run's folder, so that the next start finds it."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from ops.workers.slots import left_marks
from stages.clients.arena.registration import Registrations, preflight_model_name

KIND: Final = "preflight"


def marks_folder(run_dir: str | Path) -> Path:
    """Where preflights of a run mark themselves."""
    return Path(run_dir).absolute() / "workers"


async def remove_left_preflights(registrations: Registrations, folder: Path) -> None:
    """Remove what killed preflights registered, and their marks; advisory."""
    for mark in left_marks(folder, KIND):
        name = preflight_model_name(registrations.run_label, mark.part)
        if name in await registrations.remove_orphans([name]):
            mark.forget()
