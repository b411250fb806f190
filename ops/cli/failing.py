"""One clear line for what a person can mend; anything else keeps its traceback."""

from __future__ import annotations

import os
import sys
from collections.abc import Generator
from contextlib import contextmanager
from typing import Final

from broker.errors import BrokerError
from ops.arena.config import ArenaConfigError
from ops.cli.pipes import reader_is_gone
from ops.run_folder import RunFolderError
from pipeline.errors import PipelineError
from schemas.errors import SchemaError
from stages.clients.arena.errors import ArenaError

KNOWN: Final = (SchemaError, BrokerError, PipelineError, RunFolderError, ArenaConfigError, ArenaError)

EXIT_FAILED: Final = 1
EXIT_USAGE: Final = 2
EXIT_INTERRUPTED: Final = 130


def unfolded(error: BaseException) -> BaseException:
    """The one error inside nested groups of one."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error


def _told(error: BaseException) -> str:
    """Its text; of a file's error the place before the reason."""
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return (
            f"{os.fsdecode(error.filename)}: {error.strerror}"
            if isinstance(error.filename, str | bytes)
            else str(error)
        )
    return str(error)


@contextmanager
def plain_errors(*more: type[Exception]) -> Generator[None]:
    """Turn the errors that a person can mend into one line on stderr and exit code 1."""
    try:
        yield
    except (Exception, BaseExceptionGroup) as raised:
        error = unfolded(raised)
        if isinstance(error, BrokenPipeError) and reader_is_gone():
            raise error from None
        if isinstance(error, (*KNOWN, *more)):
            sys.stderr.write(f"headrace: {_told(error)}\n")
            exit_code: int = getattr(error, "exit_code", EXIT_FAILED)
            raise SystemExit(exit_code) from None
        raise
