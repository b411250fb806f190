"""Ties a process's life to its parent's, so that nothing survives a killed Arena. Imports only the standard library."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def die_with_parent(parent_pid: int, deadly: signal.Signals = signal.SIGKILL) -> None:
    """Ask the kernel for a signal at the parent's death; exit at once where the parent is already gone.

    Only Linux has this; elsewhere the end of standard input has to do.
    """
    if not sys.platform.startswith("linux"):
        return
    _prctl(_PR_SET_PDEATHSIG, int(deadly))
    if os.getppid() != parent_pid:
        sys.exit(1)


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent dies, so that they can be found and ended."""
    if sys.platform.startswith("linux"):
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"prctl({option}): {os.strerror(code)}")
