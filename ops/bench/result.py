"""What every benchmark gives, and the machine it ran on."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import msgspec


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """Where it ran; no names."""

    cores: int
    processor: str
    memory_gib: float
    system: str
    python: str


class BenchResult(msgspec.Struct, frozen=True, kw_only=True):
    """Figures by name; `ratio` holds metrics / reference where both exist."""

    name: str
    metrics: dict[str, float | str]
    reference: dict[str, float | str]
    ratio: dict[str, float]
    machine: Machine


def machine() -> Machine:
    """This machine."""
    processor = platform.processor()
    info = Path("/proc/cpuinfo")
    if info.is_file():
        models = [
            line.partition(":")[2].strip() for line in info.read_text().splitlines() if line.startswith("model name")
        ]
        processor = models[0] if models else processor
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return Machine(
        cores=os.cpu_count() or 1,
        processor=processor,
        memory_gib=round(memory, 1),
        system=f"{platform.system()} {platform.machine()}",
        python=platform.python_version(),
    )
