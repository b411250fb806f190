from __future__ import annotations

import os
from pathlib import Path

import anyio
import pytest
import structlog.testing
from alive import lives

from ops.running.post_exit import run_post_exit


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    return tmp_path


async def test_the_command_finds_the_logs_folder_and_what_it_prints_is_kept(logs: Path) -> None:
    (logs / "trainer.log").write_text("step 7")
    await run_post_exit('cat "$LOG_DIR/trainer.log"', logs)
    assert (logs / "post_exit.log").read_text() == "step 7"


async def test_a_failing_command_is_told_and_changes_nothing(logs: Path) -> None:
    with structlog.testing.capture_logs() as told:
        await run_post_exit("exit 3", logs)
    assert [(line["event"], line["exit"]) for line in told] == [("the post-exit command failed", 3)]


async def test_nothing_is_run_where_nothing_was_asked(logs: Path) -> None:
    await run_post_exit("", logs)
    assert not any(os.scandir(logs))


async def test_a_command_that_does_not_end_is_ended_with_all_its_children(logs: Path, wait_until) -> None:
    with structlog.testing.capture_logs() as told:
        await run_post_exit("sleep 600 & echo $! ; wait", logs, deadline_s=0.3)
    assert [line["event"] for line in told] == ["the post-exit command was ended"]
    child = int((logs / "post_exit.log").read_text())
    await wait_until(lambda: not lives(child))


async def test_a_cancelled_run_still_runs_its_command(logs: Path) -> None:
    with anyio.CancelScope() as scope:
        scope.cancel()
        await run_post_exit("echo done", logs)
    assert (logs / "post_exit.log").read_text() == "done\n"
