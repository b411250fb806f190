"""How people use headrace: the command line, wiring, supervision, log tools, the local Arena, benchmarks."""

from __future__ import annotations

from typing import Final

VERSION: Final = "0.1.0"
