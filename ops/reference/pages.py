"""Every generated file of docs/ with its text."""

from __future__ import annotations

from ops.logtools.message_docs import markdown as messages
from ops.metrics.documents import DASHBOARD_PATH, MARKDOWN_PATH, dashboard
from ops.metrics.documents import markdown as metrics
from ops.reference.commands import commands_page
from ops.reference.settings import settings_page


def generated_pages() -> dict[str, str]:
    """Path below the root of the repository → text."""
    return {
        "docs/commands.md": commands_page(),
        "docs/config.md": settings_page(),
        "docs/messages.md": messages(),
        MARKDOWN_PATH: metrics(),
        DASHBOARD_PATH: dashboard(),
    }
