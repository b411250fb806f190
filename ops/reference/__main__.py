"""`python -m ops.reference`: write every generated page again, from the root of the repository."""

from __future__ import annotations

from pathlib import Path

from ops.reference.pages import generated_pages

if __name__ == "__main__":
    for path, text in generated_pages().items():
        Path(path).write_text(text, encoding="utf-8")
