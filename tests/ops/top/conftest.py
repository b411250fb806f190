"""`top` is tested on the made-up run of the log tools' tests."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "logtools"))

from synthetic import SyntheticRun


@pytest.fixture
async def chaotic():
    """A whole run with every kind of mishap."""
    return await SyntheticRun(seed=7, num_groups=16).build()


@pytest.fixture
async def small():
    """A few groups, nothing goes wrong."""
    return await SyntheticRun(seed=1, num_groups=6, mishaps=False).build()
