"""A process whose stage stopped ends, also where its event loop never comes to it."""

from __future__ import annotations

import subprocess
import sys

SPINNING = """
from ops.workers.last_resort import end_in_any_case
def forever():
    while True:
        pass
end_in_any_case(0.05)
forever()
"""


def test_a_process_that_spins_after_a_stage_stopped_ends_and_its_log_says_where_it_hung() -> None:
    done = subprocess.run([sys.executable, "-c", SPINNING], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "did not end by itself" in done.stdout + done.stderr
    assert "in forever" in done.stderr


def test_a_process_that_ends_by_itself_is_left_alone() -> None:
    code = "from ops.workers.last_resort import end_in_any_case; end_in_any_case(60.0); raise SystemExit(7)"
    assert subprocess.run([sys.executable, "-c", code], timeout=50, check=False).returncode == 7
