"""A server in its own environment: under a leash, so that nothing of it survives its worker; its output in the run's folder.

Knows command lines and exit codes, not what the server does.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import anyio
import anyio.abc

_LEASH_FILE: Final = Path(__file__).parents[1] / "arena" / "leash.py"
_TAIL_BYTES: Final = 16 * 1024
_PRIVATE_VARIABLES: Final = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
"""Those of headrace's own environment would lead the server's interpreter astray."""


class ServerProcess:
    """One started server."""

    def __init__(self, process: anyio.abc.Process, log_file: Path) -> None:
        self._process: Final = process
        self._log_file: Final = log_file

    @property
    def pid(self) -> int:
        """Of its leash."""
        return self._process.pid

    async def wait(self) -> str:
        """Until it ended: how, in words, with the last lines that it wrote."""
        code = await self._process.wait()
        lines = last_lines(self._log_file, 6)
        return f"the server ended with {exit_text(code)}" + (f": {' | '.join(lines)}" if lines else "")


@asynccontextmanager
async def server_process(
    argv: Sequence[str], env: Mapping[str, str], log_file: str | Path, *, stop_deadline_s: float = 5.0
) -> AsyncGenerator[ServerProcess]:
    """A running server; on leaving nothing of it is left.

    Raises:
        OSError: the log file can't be written.
    """
    path = Path(log_file)
    path.parent.mkdir(parents=True, exist_ok=True)
    inherited = {name: value for name, value in os.environ.items() if name not in _PRIVATE_VARIABLES}
    with path.open("ab") as sink:  # noqa: ASYNC230 - one open per start of a server
        process = await anyio.open_process(
            [sys.executable, "-S", "-E", str(_LEASH_FILE), str(os.getpid()), *argv],
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=sink,
            env={**inherited, "PYTHONUNBUFFERED": "1", **env},
            start_new_session=True,  # what ends the worker's group must let it drain first
        )
        try:
            yield ServerProcess(process, path)
        finally:
            with anyio.CancelScope(shield=True):
                await _end(process, stop_deadline_s)


async def _end(process: anyio.abc.Process, deadline_s: float) -> None:
    """Tell the leash to end: it kills all that descends from it."""
    if process.returncode is None:
        process.send_signal(signal.SIGTERM)
        with anyio.move_on_after(deadline_s):
            await process.wait()
        if process.returncode is None:
            process.kill()
    await process.aclose()


def free_port(host: str, *, former: int = 0) -> int:
    """A port that nobody listens on now.

    Args:
        former: taken where it is free: others may still look for a server there.
    """
    for port in (former, 0) if former else (0,):
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            if port:  # the former server's last connections may still be in TIME_WAIT
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError:
                if not port:
                    raise
                continue
            return int(probe.getsockname()[1])
    raise OSError(f"{host}: no port is free")


def last_lines(path: Path, count: int) -> list[str]:
    """The end of a log, empty lines left out."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            text = file.read().decode("utf-8", errors="replace")
    except OSError:
        return []
    return [line.strip()[:300] for line in text.splitlines() if line.strip()][-count:]


def exit_text(code: int) -> str:
    """An exit code in words; a leash says 128 + signal, or 256 - signal, for a signal."""
    number = -code if code < 0 else code - 128 if 128 < code < 160 else 256 - code if code > 192 else 0
    try:
        return signal.Signals(number).name if number else f"exit code {code}"
    except ValueError:
        return f"exit code {code}"
