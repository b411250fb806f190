"""One writer a recording: a lock on its first file that ends with the process that took it, however that ends."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import BinaryIO

import structlog

from broker.recording.errors import RecordingInUseError

if sys.platform != "win32":
    import errno
    import fcntl

log = structlog.get_logger("headrace.recorder")


def lock_file(path: Path) -> BinaryIO:
    """Open `path`, making it if it isn't there, and lock it until what is returned is closed. Readers are not kept out.

    Raises:
        RecordingInUseError: another writer has it.
        OSError: it can't be opened for writing.
    """
    file = path.open("ab")
    if sys.platform == "win32":
        return file  # a lock there would keep readers out
    try:
        fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
            log.warning("this file system has no locks: see that nobody else writes this recording", file=str(path))
            return file
        file.close()
        if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
            raise
        raise RecordingInUseError(
            f"{path}: another process records into it (`headrace run --record` or `headrace record`): give this one another "
            "file, or wait until that one has ended"
        ) from error
    return file
