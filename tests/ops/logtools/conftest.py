"""The tests of this folder share `synthetic`, which importlib mode can't find by itself."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from synthetic import SyntheticRun


@pytest.fixture
async def chaotic():
    """A whole run on an in-memory broker with every kind of mishap in it."""
    return await SyntheticRun(seed=7, num_groups=24).build()


@pytest.fixture
async def small():
    """A few groups, nothing goes wrong."""
    return await SyntheticRun(seed=1, num_groups=6, mishaps=False).build()
