"""The reference pages say what the code does, and every command that any page names is one that the command line takes."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from ops.cli import COMMANDS, build_app
from ops.reference.pages import generated_pages

ROOT = Path(__file__).parents[3]
GENERATED = (
    "docs/commands.md",
    "docs/config.md",
    "docs/messages.md",
    "docs/metrics.md",
    "ops/deploy/grafana-dashboard.json",
)
PAGES = sorted([*(ROOT / "docs").glob("*.md"), ROOT / "README.md"])
CONTINUED = re.compile(r"\\\n\s*")


def test_generated_pages_are_current() -> None:
    pages = generated_pages()
    assert set(pages) == set(GENERATED)
    stale = [path for path, text in pages.items() if (ROOT / path).read_text(encoding="utf-8") != text]
    assert stale == [], "write them by `python -m ops.reference`"


def test_the_commands_page_has_every_command() -> None:
    text = (ROOT / "docs/commands.md").read_text(encoding="utf-8")
    for name, *_ in COMMANDS:
        assert f"## headrace {name}\n" in text


@pytest.mark.parametrize(
    "key", ["| `groups_per_step` |", "| `filter_zero_spread` |", "| `public_url` |", "## [training.lora]"]
)
def test_the_settings_page_has_keys_of_every_room(key: str) -> None:
    assert key in (ROOT / "docs/config.md").read_text(encoding="utf-8")


def named_commands() -> list[tuple[str, str]]:
    """(page, command line) of each `headrace …` in the fences and indented blocks of all hand-written pages."""
    found = []
    for page in PAGES:
        if f"docs/{page.name}" in GENERATED:
            continue
        text = CONTINUED.sub(" ", page.read_text(encoding="utf-8"))
        for line in text.splitlines():
            command = re.match(r"^(?:    |)(?:.*&& )?(headrace .+)$", line)
            if command and "`" not in line:
                found.append((page.name, re.split(r"\s{2,}|\s#\s| > |, ", command[1])[0].strip()))
    return found


@pytest.mark.parametrize(("page", "command"), named_commands())
def test_a_named_command_is_understood(page: str, command: str) -> None:
    """Parsed by the command line itself, not run: unknown commands, options and missing arguments are errors."""
    given = re.sub(r"\[(-?-?[\w][^\]]*)\]", r"\1", command)
    words = [word.partition("|")[0] for word in shlex.split(given)[1:] if word != "…"]
    assert words
    assert words[0] in {name for name, *_ in COMMANDS}, f"{page}: {command}"
    build_app(words[0]).parse_args(words, exit_on_error=False, print_error=False)
