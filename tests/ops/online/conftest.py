"""Makes the gateway's fakes and this folder's run importable for the tests of this folder."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "stages" / "gateway"))
sys.path.insert(0, str(Path(__file__).parent))
