"""What every `Broker` must do, as plain functions: `await check(make)` raises AssertionError where it does not.

`make()` opens one more connection to the same fresh run; a test runs through `CHECKS`.
It must not know any implementation.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from broker.api import Capability
from broker.conformance import deliveries, log, payloads, state, talk
from broker.conformance.asserting import BrokerFactory, Check

CHECKS: Final[tuple[Check, ...]] = (*log.CHECKS, *deliveries.CHECKS, *state.CHECKS, *talk.CHECKS, *payloads.CHECKS)


def checks_at(level: Collection[Capability]) -> list[Check]:
    """The checks that a broker with these capabilities must pass."""
    return [check for check in CHECKS if deliveries.NEEDS.get(check) in (None, *level)]


__all__ = ["CHECKS", "BrokerFactory", "Check", "checks_at"]
