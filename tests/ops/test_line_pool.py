"""A pool of processes: one that is killed at its start is started again, one that only dies is an error."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import anyio
import pytest

from ops.line_pool import LinePool, LineProgram

KILLED_AT_FIRST = """
import os, pathlib, signal, sys
tries = pathlib.Path(sys.argv[1])
tries.write_text(tries.read_text() + "x" if tries.exists() else "x")
if len(tries.read_text()) <= int(sys.argv[2]):
    os.kill(os.getpid(), signal.SIGKILL)
print("ready", flush=True)
sys.stdin.read()
"""


def program(tries: Path, num_killed: int) -> LineProgram[str]:
    return LineProgram(
        "p",
        [sys.executable, "-c", KILLED_AT_FIRST, str(tries), str(num_killed)],
        dict(os.environ),
        greeting=lambda line: "" if line == b"ready" else line.decode(),
        answer=lambda line: ("", line.decode()),
        died=lambda job, code: f"{job} died with {code}",
        cannot_start=RuntimeError,
        line_limit_bytes=1000,
        start_s=60.0,
        restart_s=0.01,
    )


async def test_a_process_that_is_killed_at_its_start_is_started_again(tmp_path: Path) -> None:
    pool = LinePool(program(tmp_path / "tries", 2), 1)
    with anyio.fail_after(60):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(pool.run)
            await pool.warm()
            assert len(pool.pids()) == 1
            tasks.cancel_scope.cancel()
    assert (tmp_path / "tries").read_text() == "xxx"


async def test_a_process_that_is_killed_at_every_start_is_an_error(tmp_path: Path) -> None:
    pool = LinePool(program(tmp_path / "tries", 1000), 1)
    with anyio.fail_after(60), pytest.raises(BaseExceptionGroup) as raised:
        await pool.run()
    assert raised.group_contains(RuntimeError, match="ended at its start")
    assert (tmp_path / "tries").read_text() == "x" * 6
