"""The tutorial is typed from top to bottom and every command ends as it says."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # importlib mode leaves it alone

from tutorial_page import script

ROOT = Path(__file__).parents[2]


def test_the_page_becomes_files_and_commands() -> None:
    page = "text\n```toml\n# my.toml\na = 1\n```\n```bash\nheadrace status\n```\n```bash train\nheadrace top\n```\n```bash exit=1\nfalse\n```\n"
    typed = script(install=True, train=False, page=page)
    assert "cat > my.toml <<'END-OF-FILE'\na = 1\nEND-OF-FILE\n" in typed
    assert "\nheadrace status\n" in typed
    assert "headrace top" not in typed
    assert typed.endswith("false || code=$?\n[ $code -eq 1 ]\n")


@pytest.mark.resources
@pytest.mark.timeout(600)
def test_the_tutorial_without_torch(tmp_path: Path) -> None:
    """In an empty folder with the examples, by the installation that runs this test."""
    shutil.copytree(ROOT / "examples", tmp_path / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    programs = Path(sys.executable).parent
    assert (programs / "headrace").exists(), f"{programs} has no headrace: pip install -e ."
    done = subprocess.run(
        ["bash", "-c", script(install=False, train=False)],
        cwd=tmp_path,
        env={**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "COLUMNS": "120"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    for name in ("smoke.html", "smoke.hrrec", "audit"):
        assert (tmp_path / "runs" / name).exists()


@pytest.mark.resources
@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_a_newcomers_path() -> None:
    """A fresh clone, a fresh environment, the whole page, torch included."""
    subprocess.run([sys.executable, str(Path(__file__).parent / "newcomer.py")], check=True)
