"""Every method learns the quickstart's tasks, whatever the seed. Nightly; `learning_table.py` makes docs/learning.md of the same."""

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from learning_case import METHODS, SEEDS, learn


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("method", METHODS)
def test_the_reward_rises(tmp_path, method, seed):
    rewards = learn(tmp_path, METHODS[method], seed)
    assert np.mean(rewards[:3]) <= 0.45
    assert np.mean(rewards[-10:]) >= 0.8
