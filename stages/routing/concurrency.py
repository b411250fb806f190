"""How many requests an engine gets at once: additive increase, multiplicative decrease. Pure.

The limit stays in [1, capacity]. It rises by one for each limit's worth of answers and falls by a factor when the engine queues or
fails, at most once a period.
"""

from __future__ import annotations


def increased(limit: float, capacity: int) -> float:
    """After an answer: one more request for each `limit` answers."""
    return min(float(max(capacity, 1)), limit + 1.0 / max(limit, 1.0))


def decreased(limit: float, capacity: int, factor: float) -> float:
    """After congestion or a failure; never below one request."""
    return max(1.0, min(limit, float(max(capacity, 1))) * factor)


def slots(limit: float) -> int:
    """Whole requests that a limit allows."""
    return max(1, int(limit))
