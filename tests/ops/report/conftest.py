"""Reports are tested on the made-up run of the log tools' tests."""

import asyncio
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "logtools"))

from synthetic import SyntheticRun


@pytest.fixture(scope="session")
def chaotic():
    """A whole run with every kind of mishap. Only to be read."""
    return asyncio.run(SyntheticRun(seed=7, num_groups=24).build())


@pytest.fixture(scope="session")
def recorded(chaotic, tmp_path_factory):
    """The path of its recording."""
    path = tmp_path_factory.mktemp("recorded") / "run.hrrec"
    asyncio.run(chaotic.record(path))
    return path
