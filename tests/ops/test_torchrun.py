"""What became of a trainer's ranks, as their launcher's exit code tells the supervisor."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RANKS = """
import os, signal, sys
code = int(sys.argv[1])
if os.environ["RANK"] == "1" and code:
    if code < 0:
        os.kill(os.getpid(), -code)
    sys.exit(code)
if code:
    signal.pause()
"""


@pytest.mark.parametrize(("ended", "told"), [(78, 78), (3, 1), (-9, 1), (0, 0)])
def test_the_launcher_ends_as_the_ranks_did(tmp_path, ended, told):
    script = tmp_path / "rank.py"
    script.write_text(RANKS)
    launch = [*("-m", "ops.workers.torchrun", "--standalone", "--nproc-per-node", "2"), *("--max-restarts", "0")]
    done = subprocess.run(
        [sys.executable, *launch, str(script), str(ended)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == told, done.stderr
    last = done.stderr.strip().splitlines()[-1] if done.stderr.strip() else ""
    assert ("a rank failed" in last) == bool(ended)
    if ended:
        assert '"rank": 1' in last
        assert f'"exit_code": {ended}' in last
