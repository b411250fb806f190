"""Settings of the router."""

from __future__ import annotations

import msgspec


class RoutingSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How calls are shared out among engines."""

    wait_deadline_s: float = 120.0
    """How long a call waits for an engine that may sample it and has room."""
    affinity_slack: float = 0.25
    """A session stays with its engine while that one's load is at most so much above the least loaded one's; load = requests / limit."""
    max_sessions: int = 16384
    """Sessions whose engine is remembered; the longest unused ones are forgotten."""
    silent_s: float = 5.0
    """An engine that was not heard for so long gets nothing new."""
    forget_s: float = 30.0
    """An engine that was not heard for so long has left."""
    decrease: float = 0.7
    """What is left of an engine's limit when it is congested."""
    congestion_period_s: float = 1.0
    """One decrease at the most in so long: a full queue is told many times."""
    first_quarantine_s: float = 0.2
    max_quarantine_s: float = 10.0
    probe_deadline_s: float = 5.0
