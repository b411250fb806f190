"""`python -m ops.arena CONFIG.toml`: serve a local Arena; one JSON line with its URL on standard output when ready.

`quickstart` in place of a file serves the streams of the first run. Ends on SIGTERM, SIGINT and the parent's death.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import anyio
import msgspec

from ops.arena.config import ArenaConfigError, ArenaServerConfig, load_config
from ops.arena.lifeline import die_with_parent
from ops.arena.pool import PoolError
from ops.arena.quickstart import quickstart_config
from ops.arena.server import serve

_USAGE = "usage: python -m ops.arena CONFIG.toml | quickstart"


def _announce(url: str) -> None:
    line = msgspec.json.encode({"url": url, "pid": os.getpid()}).decode()
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


async def _serve_until_told(config: ArenaServerConfig) -> None:
    async with anyio.create_task_group() as group:

        async def watch_signals() -> None:
            with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
                async for _ in signals:
                    group.cancel_scope.cancel()

        group.start_soon(watch_signals)
        await serve(config, ready=_announce)


def main(arguments: list[str]) -> int:
    """Serve; the exit code."""
    if len(arguments) != 1:
        sys.stderr.write(_USAGE + "\n")
        return 2
    die_with_parent(os.getppid(), signal.SIGTERM)
    try:
        config = quickstart_config() if arguments[0] == "quickstart" else load_config(Path(arguments[0]))
        anyio.run(_serve_until_told, config, backend_options={"use_uvloop": True})
    except (ArenaConfigError, PoolError, BaseExceptionGroup) as error:
        told = _told(error)
        if told is None:
            raise
        sys.stderr.write(f"arena: {told}\n")
        return 1
    return 0


def _told(error: BaseException) -> str | None:
    """The text of a fault that the user can mend; None for any other."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return str(error) if isinstance(error, (ArenaConfigError, PoolError)) else None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
