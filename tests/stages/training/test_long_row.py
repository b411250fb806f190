"""Long rows: what a step takes of memory beside what it can't do without (see `long_row.py`). Minutes of one core: nightly."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from long_row import computed_bytes

PROGRAM = Path(__file__).with_name("long_row.py")
LIMIT = 1.3


def measured(*arguments: str) -> dict[str, float]:
    # large tensors go back to the system when they are freed, so that resident memory tells what is alive
    env = {**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": str(2**20)}
    done = subprocess.run(
        [sys.executable, str(PROGRAM), *arguments], env=env, capture_output=True, text=True, timeout=3000, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def test_the_computed_figure_counts_what_the_module_says():
    once, twice = (computed_bytes(1000, tokens, recompute=False) for tokens in (1, 2))
    assert twice - once == 4 * (2 * (6 * 64 + 5 * 32 + 4 * 16 + 4 * 256) + 4 * 64)
    assert computed_bytes(1001, 1, recompute=False) - once == 16
    assert computed_bytes(1000, 1, recompute=True) < once


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "arguments",
    [["32768"], ["--recompute", "32768"], ["15000", "9000", "5000", "2500", "1000", "268"]],
    ids=["one row", "one row, activations recomputed", "six rows without padding"],
)
def test_a_pack_of_32k_tokens_with_a_vocabulary_of_32k_takes_little_more_than_its_activations(arguments):
    found = measured(*arguments)
    assert found["tokens"] == 32768
    assert found["grad_norm"] > 0
    assert found["ratio"] <= LIMIT, found
