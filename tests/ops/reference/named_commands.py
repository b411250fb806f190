"""Every `headrace …` that a hand-written page shows."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
GENERATED = (
    "docs/commands.md",
    "docs/config.md",
    "docs/messages.md",
    "docs/metrics.md",
    "ops/deploy/grafana-dashboard.json",
)
PAGES = sorted([*(ROOT / "docs").glob("*.md"), ROOT / "README.md"])
CONTINUED = re.compile(r"\s*\\\n\s*")
COMMAND = re.compile(r"^(?:    |)(?:.*&& )?((?:[A-Z_]+=\S+ )*headrace .+)$")
END = re.compile(r"\s{2,}|\s#\s| > |, ")
"""What follows is said about the command."""


def named_commands() -> list[tuple[str, str]]:
    """(page, command line) of each `headrace …` in the fences and indented blocks of all hand-written pages."""
    found = []
    for page in PAGES:
        if f"docs/{page.name}" in GENERATED:
            continue
        text = CONTINUED.sub(" ", page.read_text(encoding="utf-8"))
        for line in text.splitlines():
            command = COMMAND.match(line)
            typed = END.split(command[1])[0].strip() if command else ""
            if typed and "`" not in typed:
                found.append((page.name, typed))
    return found
