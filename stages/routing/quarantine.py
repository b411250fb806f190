"""When an engine that failed is asked again: backoff. Pure."""

from __future__ import annotations

import msgspec


class Quarantine(msgspec.Struct, frozen=True, kw_only=True):
    """An engine gets nothing until a probe after `until_s` finds it well."""

    reason: str
    failures: int
    """Failures and failed probes in a row."""
    until_s: float
    """On the router's clock."""


def quarantined(before: Quarantine | None, reason: str, now_s: float, *, first_s: float, max_s: float) -> Quarantine:
    """After a failure or a failed probe: twice as long as before, at most `max_s`.

    A failure while the engine is already kept away (other requests fail with it) does not lengthen it.
    """
    if before is not None and now_s < before.until_s:
        return before
    failures = 1 if before is None else before.failures + 1
    delay_s = min(max_s, first_s * 2.0 ** min(failures - 1, 32))
    return Quarantine(reason=reason, failures=failures, until_s=now_s + delay_s)
