"""A worker whose stage stopped ends, come what may: clean-up that hangs must not keep a dead stage's process alive."""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
from typing import Final

import structlog

log = structlog.get_logger("headrace.worker")

PATIENCE_S: Final = 20.0
"""What a process may take to end in good order after one of its stages stopped."""


def end_in_any_case(patience_s: float = PATIENCE_S) -> None:
    """Let this process end with exit code 1 after a while, if it has not ended by itself; its log then has where it hung."""
    timer = threading.Timer(patience_s, _end, [patience_s])
    timer.daemon = True
    timer.start()


def _end(patience_s: float) -> None:
    log.error("the process did not end by itself after a stage had stopped: it is ended", after_s=patience_s)
    faulthandler.dump_traceback(sys.stderr, all_threads=True)
    sys.stderr.flush()
    os._exit(1)
