"""Several gloo ranks against one, in processes of their own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

CASE = Path(__file__).with_name("training_case.py")
ROOT = Path(__file__).parents[3]


def run_ranks(folder: Path, num_ranks: int, last_step: int, num_rows: int = 14) -> dict[str, torch.Tensor]:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
    command = launch if num_ranks > 1 else [sys.executable]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*command, str(CASE), str(folder), str(last_step), str(num_rows)],
        env=env,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return load_file(folder / "exported" / "model.safetensors")


def largest_difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    return max(float((one[name] - other[name]).abs().max()) for name in one)


@pytest.mark.nightly
def test_two_ranks_and_one_give_the_same_weights_and_continue_each_others_checkpoints(tmp_path):
    alone = run_ranks(tmp_path / "one", 1, 3)
    together = run_ranks(tmp_path / "two", 2, 2)
    assert largest_difference(alone, together) > 1e-4
    together = run_ranks(tmp_path / "two", 1, 3)
    assert largest_difference(alone, together) < 1e-5


@pytest.mark.nightly
def test_ranks_without_rows_take_part_with_nothing(tmp_path):
    alone = run_ranks(tmp_path / "one", 1, 2, num_rows=2)
    assert largest_difference(alone, run_ranks(tmp_path / "three", 3, 2, num_rows=2)) < 1e-5
