"""`headrace … | head`: who stops reading ends the command, without a traceback."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("arguments", ["doctor", "schema", "schema run.started"])
def test_a_command_whose_reader_is_gone_ends_without_a_word(arguments: str) -> None:
    command = [sys.executable, "-m", "ops", *arguments.split()]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait() == 141
