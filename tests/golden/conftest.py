"""Golden data: the `--golden-dir` option and one test per case of whatever folder it names."""

import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
# importlib mode leaves sys.path alone, and the checks of this folder import `golden_case` and each other by name.
sys.path.insert(0, str(HERE))

from golden_case import load_cases  # noqa: E402 - needs the path above


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--golden-dir", type=Path, help="folder of golden data files (default: tests/golden/data)")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "golden" in metafunc.fixturenames:
        # Without a path on the command line this file is read after the options were parsed: hence the default here.
        folder = metafunc.config.getoption("golden_dir", default=None) or HERE / "data"
        cases = load_cases(folder)
        metafunc.parametrize("golden", cases, ids=[f"{case.file}/{case.name}" for case in cases])
