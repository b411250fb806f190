from __future__ import annotations

import os
import sys
from pathlib import Path

import anyio
import psutil
import pytest

from ops.supervise.orphans import OrphanWatch

TREE = """
import subprocess, sys
grandchild = subprocess.Popen(["sleep", "600"], start_new_session=True)
print(grandchild.pid, flush=True)
sys.stdin.read()
"""
SUPERVISOR = """
import subprocess, sys, anyio
from ops.supervise.orphans import end_orphans
async def main():
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(lambda: end_orphans(period_s=0.05))
        child = await anyio.open_process([sys.executable, "-c", sys.argv[1]], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        grandchild = (await child.stdout.receive()).decode().strip()
        await anyio.sleep(0.5)  # several looks of the same event loop
        print(child.pid, grandchild, flush=True)
        await anyio.sleep(600)
anyio.run(main)
"""


def test_one_that_was_deeper_and_is_a_direct_child_now_has_lost_its_parent() -> None:
    watch = OrphanWatch()
    assert watch.orphans({(1, 0.0): True, (2, 0.0): False}) == []
    assert watch.orphans({(1, 0.0): True, (2, 0.0): True}) == [(2, 0.0)]


def test_a_child_of_ones_own_and_a_number_that_is_used_again_are_no_orphans() -> None:
    watch = OrphanWatch()
    watch.orphans({(2, 0.0): False})
    assert watch.orphans({(2, 9.0): True, (3, 0.0): True}) == []
    assert watch.orphans({(2, 9.0): True, (3, 0.0): True}) == []


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux hands orphans to an ancestor")
async def test_a_grandchild_in_a_session_of_its_own_does_not_outlive_a_killed_child(wait_until) -> None:
    root = Path(__file__).parents[2]
    process = await anyio.open_process(
        [sys.executable, "-c", SUPERVISOR, TREE], cwd=root, env={**os.environ, "PYTHONPATH": str(root)}
    )
    try:
        text = b""
        with anyio.fail_after(120):
            while b"\n" not in text:
                text += await process.stdout.receive()
        child, grandchild = (int(word) for word in text.split())
        psutil.Process(child).kill()
        await wait_until(lambda: not psutil.pid_exists(grandchild), deadline_s=120)
    finally:
        process.kill()
        await process.wait()
        await process.aclose()
