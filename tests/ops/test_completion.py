import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def completed(script: Path, line: str) -> list[str]:
    """What a bash with the script offers for the last word of a line."""
    words = line.split(" ")
    text = f"""
source {script}
COMP_WORDS=({line}); [ -n "{words[-1]}" ] || COMP_WORDS+=("")
COMP_CWORD={len(words) - 1}; COMP_LINE="{line}"; COMP_POINT={len(line)}
_headrace headrace "{words[-1]}" "{words[-2]}"
printf '%s\\n' "${{COMPREPLY[@]}}"
"""
    return subprocess.run(["bash", "-c", text], capture_output=True, text=True, check=True).stdout.split()


@pytest.fixture(scope="module")
def script(tmp_path_factory) -> Path:
    home = tmp_path_factory.mktemp("home")
    command = [sys.executable, "-m", "ops", "--install-completion", "--shell", "bash", "--output", str(home / "script")]
    environment = {**os.environ, "HOME": str(home)}
    subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, timeout=60, check=True)
    return home / "script"


def test_a_shell_completes_the_commands_of_the_log(script: Path) -> None:
    assert {"record", "replay"} <= set(completed(script, "headrace re"))


def test_a_shell_completes_the_options_of_a_command(script: Path) -> None:
    assert completed(script, "headrace tap --from") == ["--from-start"]
