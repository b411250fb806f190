"""The reference pages say what the code does, and every command that any page names is one that the command line takes."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest

from ops.cli import COMMANDS, build_app
from ops.reference.pages import generated_pages

sys.path.insert(0, str(Path(__file__).parent))  # importlib mode leaves it alone

from named_commands import GENERATED, ROOT, named_commands


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


@pytest.mark.parametrize(("page", "command"), named_commands())
def test_a_named_command_is_understood(page: str, command: str) -> None:
    """Parsed by the command line itself, not run: unknown commands, options and missing arguments are errors."""
    given = re.sub(r"\[(-?-?[\w][^\]]*)\]", r"\1", command)
    typed = [word.partition("|")[0] for word in shlex.split(re.sub(r" < \S+$", "", given)) if word != "…"]
    words = typed[typed.index("headrace") + 1 :]
    assert words
    assert words[0] in {name for name, *_ in COMMANDS}, f"{page}: {command}"
    build_app(words[0]).parse_args(words, exit_on_error=False, print_error=False)
