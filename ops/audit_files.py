"""Audit records as JSON lines in files that only their owner can read.

The folder is made 0700 and each file 0600; a symbolic link in place of either is refused, so that nobody can have the records written
somewhere else.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from pathlib import Path

import msgspec

from stages.clients.arena.audit import AuditRecord


class AuditFileError(Exception):
    """The records can't be written safely; the text says which path and why."""


def write_audit(folder: Path, name: str, records: Iterable[AuditRecord]) -> int:
    """Write all records to one new or replaced file; the number written.

    Raises:
        AuditFileError: The folder or the file is a link, no folder, or open to others.
    """
    fd = _open_folder(folder)
    try:
        return _write(fd, folder / name, name, records)
    finally:
        os.close(fd)


def _open_folder(folder: Path) -> int:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError as error:
        raise AuditFileError(f"{folder}: expected a folder that is no symbolic link: {error.strerror}") from error
    if os.fstat(fd).st_uid != os.geteuid():
        os.close(fd)
        raise AuditFileError(f"{folder}: belongs to another user, expected our own")
    os.fchmod(fd, 0o700)
    return fd


def _write(folder_fd: int, path: Path, name: str, records: Iterable[AuditRecord]) -> int:
    if os.sep in name or name in ("", ".", ".."):
        raise AuditFileError(f"{name!r}: expected a plain file name")
    flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW
    try:
        fd = os.open(name, flags, 0o600, dir_fd=folder_fd)
    except OSError as error:
        raise AuditFileError(f"{path}: expected a file that is no symbolic link: {error.strerror}") from error
    count = 0
    with os.fdopen(fd, "wb") as file:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode) or info.st_nlink > 1:
            raise AuditFileError(f"{path}: expected a plain file with one name")
        os.fchmod(fd, 0o600)
        os.ftruncate(fd, 0)
        for record in records:
            file.write(msgspec.json.encode(record) + b"\n")
            count += 1
    return count
