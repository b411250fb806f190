"""`python -m ops.metrics`: write docs/metrics.md and the dashboard again, from the root of the repository."""

from __future__ import annotations

from pathlib import Path

from ops.metrics.documents import DASHBOARD_PATH, MARKDOWN_PATH, dashboard, markdown

if __name__ == "__main__":
    Path(MARKDOWN_PATH).write_text(markdown(), encoding="utf-8")
    Path(DASHBOARD_PATH).write_text(dashboard(), encoding="utf-8")
