from __future__ import annotations

import sys
from pathlib import Path

import anyio
import psutil
import pytest
from alive import lives

from ops.supervise.process import ProcessGivenUpError, ProcessSpec, RestartPolicy, SupervisedProcess
from ops.supervise.supervisor import Supervisor

QUICK = RestartPolicy(max_restarts=2, first_delay_s=0.01, max_delay_s=0.01)
TREE = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
children = [subprocess.Popen([sys.executable, "-c",
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"]) for _ in range(2)]
print(os.getpid(), *[child.pid for child in children], flush=True)
time.sleep(600)
"""


def spec(tmp_path: Path, code: str, **changes) -> ProcessSpec:
    options = {"restart": QUICK, "stop_deadline_s": 0.2, **changes}
    return ProcessSpec(
        name="worker", argv=[sys.executable, "-c", code], log_file=str(tmp_path / "logs" / "worker.log"), **options
    )


def alive(pids: list[int]) -> list[int]:
    return [pid for pid in pids if lives(pid)]


# prime-rl#2158: grandchildren that ignore SIGTERM survive a launcher that signals its direct child only
async def test_stopping_ends_grandchildren_that_ignore_sigterm(tmp_path: Path, wait_until) -> None:
    lines: list[str] = []
    async with anyio.create_task_group() as tasks:
        supervisor = Supervisor(tasks)
        await supervisor.start(spec(tmp_path, TREE, waits_for_ready=True), on_ready=lines.append)
        pids = [int(word) for word in lines[0].split()]
        assert len(alive(pids)) == 3
        await supervisor.stop()
        await wait_until(lambda: not alive(pids))


async def test_a_killed_process_takes_its_children_along_and_is_started_again(tmp_path: Path, wait_until) -> None:
    lines: list[str] = []
    async with anyio.create_task_group() as tasks:
        supervisor = Supervisor(tasks)
        process = await supervisor.start(spec(tmp_path, TREE, waits_for_ready=True), on_ready=lines.append)
        first = [int(word) for word in lines[0].split()]
        psutil.Process(first[0]).kill()
        await wait_until(lambda: len(lines) == 2)
        assert alive(first) == []
        assert process.num_restarts == 1
        await supervisor.stop()


async def test_a_process_that_dies_too_often_is_given_up_with_its_last_lines(tmp_path: Path) -> None:
    code = "import sys; print('the port is taken', file=sys.stderr); sys.exit(3)"
    process = SupervisedProcess(spec(tmp_path, code))
    with pytest.raises(ProcessGivenUpError, match=r"ended 3 times within 60 s \(last: exit code 3\)") as caught:
        await process.run()
    assert "the port is taken" in str(caught.value)


async def test_a_process_s_last_lines_hold_nothing_of_a_former_supervisor(tmp_path: Path) -> None:
    for words in ("former", "latter"):
        code = f"""import json, sys; sys.stderr.write(json.dumps({{"event": "failed", "error": "E: {words}"}})); sys.exit(78)"""
        process = SupervisedProcess(spec(tmp_path, code))
        with pytest.raises(ProcessGivenUpError) as raised:
            await process.run()
    assert ("former" in str(raised.value), "latter" in str(raised.value)) == (False, True)
    assert process.last_error() == "E: latter"


async def test_log_lines_in_json_are_shown_as_text(tmp_path: Path) -> None:
    code = """import sys; print('{"level": "error", "event": "worker failed", "error": "no disk", "exception": "T"}', file=sys.stderr); sys.exit(1)"""
    with pytest.raises(ProcessGivenUpError, match="error worker failed no disk"):
        await SupervisedProcess(spec(tmp_path, code)).run()


async def test_one_given_up_essential_process_fails_the_supervisor(tmp_path: Path) -> None:
    async with anyio.create_task_group() as tasks:
        supervisor = Supervisor(tasks)
        await supervisor.start(spec(tmp_path, "raise SystemExit(1)"))
        await supervisor.failed.wait()
        assert "exit code 1" in str(supervisor.failure)


async def test_a_process_that_is_done_is_not_started_again(tmp_path: Path) -> None:
    process = SupervisedProcess(spec(tmp_path, "print('done')", finishes=True))
    await process.run()
    assert process.finished.is_set()
    assert process.num_restarts == 0


async def test_a_process_that_never_says_it_is_ready_is_given_up(tmp_path: Path) -> None:
    code = "import time; time.sleep(600)"
    process = SupervisedProcess(spec(tmp_path, code, waits_for_ready=True, ready_deadline_s=0.2))
    with pytest.raises(ProcessGivenUpError, match=r"was not ready within 0\.2 s"):
        await process.run()


async def test_a_clean_exit_of_a_service_counts_as_a_death(tmp_path: Path) -> None:
    with pytest.raises(ProcessGivenUpError, match="exit code 0"):
        await SupervisedProcess(spec(tmp_path, "pass")).run()


class Clock:
    """Each look at it is so much later than the one before."""

    def __init__(self, step_s: float) -> None:
        self.step_s = step_s
        self.now_s = 0.0

    def __call__(self) -> float:
        self.now_s += self.step_s
        return self.now_s


async def test_a_process_that_only_dies_is_given_up_however_slowly_it_does(tmp_path: Path) -> None:
    code = "import sys; print('no such step', file=sys.stderr); sys.exit(1)"
    slow = spec(tmp_path, code, progress_file=str(tmp_path / "progress"))
    process = SupervisedProcess(slow, now=Clock(300.0))
    with pytest.raises(
        ProcessGivenUpError, match=r"ended 3 times in a row without any progress .*exit code 1"
    ) as caught:
        await process.run()
    assert process.num_restarts == 2
    assert "no such step" in str(caught.value)


async def test_deaths_between_which_something_was_done_are_not_counted_together(tmp_path: Path) -> None:
    progress, starts = tmp_path / "progress", tmp_path / "starts"
    code = f"""
import os, pathlib, sys
starts, progress = pathlib.Path({str(starts)!r}), pathlib.Path(os.environ["HEADRACE_PROGRESS_FILE"])
number = len(starts.read_text()) if starts.exists() else 0
starts.write_text("." * (number + 1))
if number == 8:
    sys.exit(0)
if number % 2:
    progress.write_text(str(number))
    os.utime(progress, (number, number))
sys.exit(1)
"""
    process = SupervisedProcess(spec(tmp_path, code, progress_file=str(progress), finishes=True), now=Clock(300.0))
    await process.run()
    assert process.finished.is_set()
    assert process.num_restarts == 8


async def test_having_lived_for_long_counts_as_progress_where_nothing_else_tells(tmp_path: Path) -> None:
    starts = tmp_path / "starts"
    code = f"""
import pathlib, sys
starts = pathlib.Path({str(starts)!r})
number = len(starts.read_text()) if starts.exists() else 0
starts.write_text("." * (number + 1))
sys.exit(0 if number == 5 else 1)
"""
    process = SupervisedProcess(spec(tmp_path, code, finishes=True), now=Clock(61.0))
    await process.run()
    assert process.num_restarts == 5


async def test_a_process_that_says_it_is_no_use_is_not_started_again(tmp_path: Path) -> None:
    process = SupervisedProcess(spec(tmp_path, "raise SystemExit(78)"))
    with pytest.raises(ProcessGivenUpError, match=r"worker ended \(exit code 78\)"):
        await process.run()
    assert process.num_restarts == 0
