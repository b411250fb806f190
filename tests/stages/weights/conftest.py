from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from weights_case import Broadcast


@pytest.fixture
def broadcast(tmp_path: Path) -> Broadcast:
    return Broadcast(tmp_path)
