"""When a request is sent again and how long the client waits before it. Pure."""

from __future__ import annotations

from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

MAX_BACKOFF_S = 10.0
MAX_RETRY_AFTER_S = 300.0
"""An Arena that asks for more has to be asked again by the stage, not waited for inside one call."""


def retryable_status(status: int) -> bool:
    """Whether an answer of that status is worth another try."""
    return status == 429 or status >= 500


def pause_s(try_number: int, retry_after: str | None, now: datetime) -> float:
    """Seconds before the next try: min(2^n, 10), or what the Arena asks for.

    Args:
        try_number: Tries that failed before this one (0 for the first).
        retry_after: The header's text: seconds or an HTTP date.
        now: The time, with a zone.
    """
    asked = _asked_s(retry_after, now) if retry_after else None
    if asked is not None:
        return min(max(asked, 0.0), MAX_RETRY_AFTER_S)
    return min(2.0**try_number, MAX_BACKOFF_S)


def _asked_s(text: str, now: datetime) -> float | None:
    if text.strip().isdecimal():
        return float(text)
    try:
        when = parsedate_to_datetime(text)
    except ValueError:
        return None
    if when.tzinfo is None:
        when = when.replace(tzinfo=UTC)
    return (when - now).total_seconds()
