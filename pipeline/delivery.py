"""What to do with a message whose handling failed: pure decisions, property-tested.

The number of deliveries counts crashes too (the broker delivers again what a dead worker held), so a message that
kills its worker also ends among the dead letters.
"""

from __future__ import annotations

import random
from typing import assert_never

import msgspec

from broker.errors import RetryableBrokerError, StoreFullError
from pipeline.errors import ContractError, RefusedError, RetryableError
from schemas.errors import SchemaError


class RetryPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """How often and how fast a stage tries again."""

    max_attempts: int = 5
    """Deliveries after which an unknown error gives a message up. A broker that is away, slow or full is no fault of the message and counts
    as a retryable one."""
    max_deliveries: int = 60
    """Deliveries after which even a retryable error, or a worker that keeps dying, gives it up."""
    first_delay_s: float = 0.2
    max_delay_s: float = 30.0
    jitter: float = 0.25
    """± share of the delay."""


class Ack(msgspec.Struct, frozen=True, tag=True):
    """Done."""


class Retry(msgspec.Struct, frozen=True, tag=True):
    """Deliver again after a delay."""

    delay_s: float


class GiveUp(msgspec.Struct, frozen=True, tag=True):
    """To the dead letters."""

    reason: str
    """`undecodable`, `refused`, `attempts` or `deliveries`."""


class Stop(msgspec.Struct, frozen=True, tag=True):
    """The worker must stop; the message stays for whoever comes after it."""

    reason: str


Decision = Ack | Retry | GiveUp | Stop


def backoff_s(attempt: int, policy: RetryPolicy, jitter_unit: float) -> float:
    """The delay after the `attempt`-th failure (from 1): doubling, capped, spread by `jitter_unit` in [0, 1)."""
    delay = min(policy.max_delay_s, policy.first_delay_s * 2.0 ** min(attempt - 1, 30))
    return delay * (1.0 + policy.jitter * (2.0 * jitter_unit - 1.0))


def decide(error: Exception | None, attempt: int, policy: RetryPolicy, jitter_unit: float | None = None) -> Decision:
    """What becomes of a message after its `attempt`-th delivery (from 1) ended with `error`, or well."""
    unit = random.random() if jitter_unit is None else jitter_unit  # noqa: S311 - spreads retries, guards nothing
    match _one_of(error):
        case None:
            return Ack()
        case ContractError():
            return Stop(reason=str(error))
        case RefusedError() | SchemaError():
            return GiveUp(reason="refused")
        case RetryableError() | RetryableBrokerError() | StoreFullError():
            return (
                GiveUp(reason="deliveries")
                if attempt >= policy.max_deliveries
                else Retry(delay_s=backoff_s(attempt, policy, unit))
            )
        case Exception():
            return (
                GiveUp(reason="attempts")
                if attempt >= policy.max_attempts
                else Retry(delay_s=backoff_s(attempt, policy, unit))
            )
        case _:
            assert_never(error)


def _one_of(error: Exception | None) -> Exception | None:
    """The error that decides of those that happened together: the one that is worst to try again."""
    if not isinstance(error, ExceptionGroup):
        return error
    found = [one for one in map(_one_of, error.exceptions) if one is not None]
    return max(found, key=_badness)


def _badness(error: Exception) -> int:
    match error:
        case ContractError():
            return 3
        case RefusedError() | SchemaError():
            return 2
        case RetryableError() | RetryableBrokerError() | StoreFullError():
            return 0
        case _:
            return 1


def decide_before(attempt: int, policy: RetryPolicy) -> GiveUp | None:
    """Whether a message is given up before it is handled again: it was delivered too often (its workers died)."""
    return GiveUp(reason="deliveries") if attempt > policy.max_deliveries else None
