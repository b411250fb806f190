"""Publishing that waits out a broker that is away or full: work that was done is not thrown away."""

from __future__ import annotations

import random
from typing import Final

import anyio
import structlog

from broker.api import Broker, Published
from broker.errors import RetryableBrokerError, StoreFullError
from pipeline.delivery import RetryPolicy, backoff_s
from pipeline.metrics import Metrics

log = structlog.get_logger("headrace.publishing")
_POLICY: Final = RetryPolicy(first_delay_s=0.1, max_delay_s=5.0)


async def publish_patiently(broker: Broker, subject: str, data: bytes, metrics: Metrics) -> Published:
    """Publish until it is stored. A broker that is away or full is named in the metrics and waited for.

    Raises:
        TooLargeError, NoSuchStreamError: waiting would not help.
    """
    attempt = 0
    while True:
        try:
            published = await broker.publish(subject, data)
        except StoreFullError as error:
            blocked, reason = "blocked: store full", str(error)
        except RetryableBrokerError as error:
            blocked, reason = "blocked: broker away", str(error)
        else:
            if attempt:
                metrics.work()
            return published
        attempt += 1
        metrics.wait_for(blocked)
        log.warning(blocked, stage=metrics.stage, subject=subject, attempt=attempt, error=reason)
        await anyio.sleep(backoff_s(attempt, _POLICY, random.random()))  # noqa: S311 - spreads retries
