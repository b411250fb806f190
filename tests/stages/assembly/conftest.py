"""The tests of this folder share `assembly_log`, which importlib mode can't find by itself."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
