"""A command whose output nobody reads any more (`headrace why … | head`) ends without a word, as other programs do."""

from __future__ import annotations

import os
import select
import sys


def reader_is_gone() -> bool:
    """Whether stdout is a pipe that its reader closed."""
    try:
        stdout = sys.stdout.fileno()
    except (OSError, ValueError):
        return False
    looking = select.poll()
    looking.register(stdout, 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in looking.poll(0))


def forget_stdout() -> None:
    """What is still buffered for it goes nowhere."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
