"""The rendered batch script, run by bash: the job's hosts are loopback addresses, srun runs its command here."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import anyio
import pytest

from ops.deploy.plan import Places
from ops.deploy.render import render, write_all
from ops.nodes.file import load_cluster

ROOT = Path(__file__).parents[3]
TOPOLOGY = f"""
config = "{ROOT / "examples" / "own_agent.toml"}"
set = ['run.dir="run"', 'run.steps=3', 'streams.vowels.rows="{ROOT / "examples" / "own_agent.jsonl"}"']

[broker]
port = 24333

[[nodes]]
name = "rollout"
address = "anywhere"
launchers = 1
gateways = 1

[[nodes]]
name = "head"
address = "elsewhere"
control = true
broker = true
trainer = true
fan_out = 1
rewards = 1
"""
SRUN = """#!/bin/bash
while [[ "$1" == --* ]]; do shift; done
exec "$@"
"""
SCONTROL = """#!/bin/bash
[[ "$1 $2 $3" == "show hostnames two-hosts" ]] && printf '127.0.0.5\\n127.0.0.6\\n'
"""

pytestmark = [pytest.mark.resources, pytest.mark.timeout(240)]


async def test_a_job_s_hosts_become_the_nodes_and_the_run_goes_to_its_end(tmp_path) -> None:
    (tmp_path / "two.toml").write_text(TOPOLOGY)
    commands, job = tmp_path / "bin", tmp_path / "job"
    commands.mkdir()
    for name, text in (
        ("srun", SRUN),
        ("scontrol", SCONTROL),
        ("headrace", f'#!/bin/bash\nexec {sys.executable} -m ops "$@"\n'),
    ):
        (commands / name).write_text(text)
        (commands / name).chmod(0o755)
    write_all(render(load_cluster(tmp_path / "two.toml"), "slurm", Places(headrace=str(commands / "headrace"))), job)
    environment = {
        **os.environ,
        "PATH": f"{commands}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "SLURM_JOB_NODELIST": "two-hosts",
    }
    done = await anyio.run_process(["bash", "headrace.sbatch"], cwd=job, env=environment, check=False)
    said = done.stderr.decode()
    assert done.returncode == 0, said[-4000:]
    assert "node rollout left: the run is over" in said
    assert (job / "run" / "rollout" / "endpoints.json").is_file()
    assert (job / "secrets.json").stat().st_mode & 0o777 == 0o600
