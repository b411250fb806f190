"""Runs one command so that nothing of it survives: `python leash.py PARENT_PID PROGRAM ARGS…`.

The command gets a session of its own. When it ends, when this process is told to end, or when the parent dies, all its descendants
are killed, also those that left its process group. Run by path with `-S -E`, so it imports only the standard library.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from types import FrameType

sys.path.insert(0, str(Path(__file__).parent))

from lifeline import adopt_orphans, die_with_parent  # pyright: ignore[reportImplicitRelativeImport, reportMissingImports, reportUnknownVariableType] - run by path, without the package, to start in a few milliseconds


class _ToldToEndError(Exception):
    """SIGTERM or SIGINT arrived."""


def _told_to_end(signum: int, _frame: FrameType | None) -> None:
    for deaf in (signal.SIGTERM, signal.SIGINT):  # a second signal must not cut the clean-up short
        signal.signal(deaf, signal.SIG_IGN)
    raise _ToldToEndError(signum)


def _children(pid: int) -> list[int]:
    try:
        text = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii")
    except OSError:
        return []
    return [int(word) for word in text.split()]


def _kill_descendants() -> None:
    while True:
        found = _children(os.getpid())
        if not found:
            return
        for pid in found:
            try:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            except (ProcessLookupError, ChildProcessError):
                continue


def main(arguments: list[str]) -> int:
    """Run the command to its end; its exit code, or 128 + signal."""
    parent_pid, command = int(arguments[0]), arguments[1:]
    signal.signal(signal.SIGTERM, _told_to_end)
    signal.signal(signal.SIGINT, _told_to_end)
    die_with_parent(parent_pid, signal.SIGTERM)
    adopt_orphans()
    pid = 0
    try:
        own_pid = os.getpid()
        pid = os.fork()
        if pid == 0:
            _become(command, own_pid)
        _, status = os.waitpid(pid, 0)
        return os.waitstatus_to_exitcode(status) % 256
    except _ToldToEndError as told:
        return 128 + int(told.args[0])
    finally:
        if pid:
            _kill_group(pid)
        _kill_descendants()


def _become(command: list[str], parent_pid: int) -> None:
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.setsid()
        die_with_parent(parent_pid)
        os.execvp(command[0], command)  # noqa: S606 - starting the configured program is this file's purpose
    except OSError as error:
        sys.stderr.write(f"can't start {command[0]!r}: {error}\n")
    os._exit(127)


def _kill_group(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
