# ruff: noqa: ASYNC220, ASYNC240 - starting a server takes some milliseconds
"""NATS servers with a config that the test writes; `EmbeddedServer` writes its own."""

from __future__ import annotations

import json
import subprocess
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

from waiting import wait_until

from broker.embedded import _read_port, find_binary


@asynccontextmanager
async def nats_server(folder: Path, config: str) -> AsyncGenerator[int]:
    """A server with this config, that listens and stores where it likes; its port."""
    folder.mkdir()
    (folder / "c.conf").write_text(
        f'listen: "127.0.0.1:-1"\nports_file_dir: {json.dumps(str(folder))}\n'
        f"jetstream {{ store_dir: {json.dumps(str(folder))} }}\n{config}\n"
    )
    process = subprocess.Popen([find_binary(), "-c", str(folder / "c.conf"), "-l", str(folder / "log")])
    try:
        yield await port_of(process, folder)
    finally:
        process.terminate()
        process.wait()


async def port_of(process: subprocess.Popen[bytes], folder: Path) -> int:
    """Where a server listens, once it does: its log and its ports file are in this folder."""
    ports_file = folder / f"nats-server_{process.pid}.ports"

    def listens() -> bool:
        assert process.poll() is None, (folder / "log").read_text()
        return _read_port(ports_file) > 0

    await wait_until(listens, "nats-server listens", deadline_s=20)
    return _read_port(ports_file)
