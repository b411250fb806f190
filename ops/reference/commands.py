"""docs/commands.md: every command with its arguments, from the command line itself."""

from __future__ import annotations

import re
from typing import Final

from ops.cli import build_app

_HEAD: Final = """\
# Commands

Generated from the code by `python -m ops.reference`; do not edit by hand. `headrace COMMAND --help` tells the same.
"""
_FIRST: Final = "headrace run"


def commands_page() -> str:
    """The page: cyclopts writes it, without its own contents list and with this page's head."""
    whole = build_app().generate_docs(output_format="markdown", include_hidden=False)
    start = whole.index(f"## {_FIRST}\n")
    return f"{_HEAD}\n{_tidied(whole[start:])}"


def _tidied(text: str) -> str:
    """The same text however it is made: without how this process was started; one empty line between parts."""
    lines = [re.sub(r"^(headrace(?: [a-z-]+)+?) -m [\w.]+", r"\1", line.rstrip()) for line in text.splitlines()]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip() + "\n"
