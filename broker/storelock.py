"""A lock on a folder that lasts as long as any process that inherited it: the server and whoever started it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from broker.errors import StoreLockedError

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl


class StoreLock:
    """An exclusive lock on one file. Its text says who holds it."""

    def __init__(self, descriptor: int, path: Path) -> None:
        self._descriptor = descriptor
        self._path = path

    @classmethod
    def take(cls, path: Path) -> StoreLock:
        """Lock `path` now, or say who has it.

        Raises:
            StoreLockedError: somebody else has it.
            OSError: the file can't be made.
        """
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            if sys.platform == "win32":
                msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
            else:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.read(descriptor, 200).decode("utf-8", "replace").strip() or "another process"
            os.close(descriptor)
            raise StoreLockedError(
                f"the store {path.parent} is in use by {holder}: stop it, or give this run another folder"
            ) from error
        return cls(descriptor, path)

    def fileno(self) -> int:
        """For passing on to a child."""
        return self._descriptor

    def note(self, text: str) -> None:
        """Write down who holds the lock."""
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, text.encode(), 0) if sys.platform != "win32" else os.write(
            self._descriptor, text.encode()
        )

    def release(self) -> None:
        """Let go; the lock ends when every inheritor has let go, too."""
        os.close(self._descriptor)
