"""Server processes: their log, their end, and that nothing of them outlives their worker."""

from __future__ import annotations

import sys
from pathlib import Path

import anyio
import psutil

from ops.engines.server_process import exit_text, server_process

FAMILY = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print(child.pid, flush=True)
time.sleep(600)
"""
WORKER = """
import sys, anyio
from ops.engines.server_process import server_process
async def main():
    async with server_process([sys.executable, "-c", sys.argv[1]], {}, sys.argv[2]) as process:
        print(process.pid, flush=True)
        await process.wait()
anyio.run(main)
"""


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


async def test_how_a_server_ended_is_told_with_its_last_words(tmp_path: Path) -> None:
    code = "import sys; print('no such flag: --tensor'); sys.exit(2)"
    async with server_process([sys.executable, "-c", code], {}, tmp_path / "server.log") as process:
        with anyio.fail_after(20):
            assert await process.wait() == "the server ended with exit code 2: no such flag: --tensor"


async def test_a_program_that_is_not_there_is_told(tmp_path: Path) -> None:
    async with server_process(["/no/such/python"], {}, tmp_path / "server.log") as process:
        with anyio.fail_after(20):
            assert "can't start '/no/such/python'" in await process.wait()


async def test_servers_get_their_own_python_path_and_the_variables_given(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/headrace/own")
    code = "import os; print(os.environ.get('PYTHONPATH'), os.environ['MARK'])"
    async with server_process([sys.executable, "-c", code], {"MARK": "here"}, tmp_path / "server.log") as process:
        with anyio.fail_after(20):
            assert "None here" in await process.wait()


async def test_leaving_ends_a_server_with_all_its_descendants(tmp_path: Path, wait_until) -> None:
    log = tmp_path / "server.log"
    async with server_process([sys.executable, "-c", FAMILY], {}, log):
        await wait_until(lambda: log.exists() and log.read_text().strip().isdecimal())
    await wait_until(lambda: gone(int(log.read_text())))


async def test_nothing_of_a_server_outlives_a_killed_worker(tmp_path: Path, wait_until) -> None:
    log = tmp_path / "server.log"
    worker = await anyio.open_process([sys.executable, "-c", WORKER, FAMILY, str(log)])
    assert worker.stdout is not None
    leash = int(await worker.stdout.receive())
    await wait_until(lambda: log.exists() and log.read_text().strip().isdecimal())
    family = [leash, int(log.read_text()), *(child.pid for child in psutil.Process(leash).children(recursive=True))]
    worker.kill()
    await worker.wait()
    await wait_until(lambda: all(gone(pid) for pid in family))
    await worker.aclose()


def test_exits_are_told_in_words() -> None:
    assert exit_text(137) == exit_text(-9) == exit_text(247) == "SIGKILL"
    assert exit_text(1) == "exit code 1"
