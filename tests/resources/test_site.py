"""The documentation is one site without a broken link."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.resources
def test_the_site_builds_and_every_link_leads_somewhere(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "sphinx",
        "-W",
        "--keep-going",
        "-n",
        "-q",
        "-b",
        "html",
        str(ROOT / "docs"),
        str(tmp_path),
    ]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    pages = {page.stem for page in (ROOT / "docs").glob("*.md")}
    assert {page.stem for page in tmp_path.glob("*.html")} >= pages
    assert "Replay a bad step" in (tmp_path / "tutorial.html").read_text(encoding="utf-8")
