"""Makes `training_case` importable: it is a module of these tests and a program that torchrun starts."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
