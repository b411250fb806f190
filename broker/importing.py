"""Importing a library without one of its optional dependencies, where that would cost every process and serve none.

It must not know which libraries there are.
"""

from __future__ import annotations

import importlib
import sys


def import_without(optional: str, library: str) -> None:
    """Import `library` as if `optional` were not installed. Nothing is hidden from anybody else, nor where `optional` is loaded already.

    For the top of a package's `__init__`, which nothing else of the process waits for in another thread.
    """
    if optional in sys.modules:
        importlib.import_module(library)
        return
    sys.modules[optional] = None  # pyright: ignore[reportArgumentType] - the import system's own word for "not to be had"
    try:
        importlib.import_module(library)
    finally:
        del sys.modules[optional]
