"""The tests of this folder share `synthetic`, which importlib mode can't find by itself."""

import asyncio
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from synthetic import SyntheticRun

from broker.recording import Recording


@pytest.fixture(scope="session")
def chaotic():
    """A whole run on an in-memory broker with every kind of mishap in it. Only to be read."""
    return asyncio.run(SyntheticRun(seed=7, num_groups=24).build())


@pytest.fixture(scope="session")
def recorded(chaotic, tmp_path_factory):
    """The path of its recording."""
    path = tmp_path_factory.mktemp("recorded") / "run.hrrec"
    asyncio.run(chaotic.record(path))
    return path


@pytest.fixture
def recording(recorded):
    with Recording(recorded) as opened:
        yield opened


@pytest.fixture
async def small():
    """A few groups, nothing goes wrong."""
    return await SyntheticRun(seed=1, num_groups=4, mishaps=False).build()
