"""What a run's config says of the room that its groups need, before any group was measured."""

from __future__ import annotations

from typing import Final

from ops.config import RunConfig
from pipeline.room import USABLE_SHARE

TOKEN_BYTES: Final = 24
"""Of a token that was sampled: its id, log-prob, mask and version, in the interaction and again in the row."""
SLOT_BYTES: Final = 32 * 1024
"""Of an episode's messages."""


def issue_below_at_start(config: RunConfig) -> int | None:
    """The first group for which no room is known before it was measured what one takes: as if each used all its context. None without limits.

    A step's groups are always let in: without them nothing is measured.
    """
    sampling = config.sampling
    group_bytes = sampling.slots_per_group * (config.rollout.max_context_tokens * TOKEN_BYTES + SLOT_BYTES)
    limits = [size for size in (config.broker.max_bytes, config.broker.max_payload_store_bytes) if size > 0]
    if not limits:
        return None
    return max(sampling.groups_per_step, int(USABLE_SHARE * min(limits)) // group_bytes)
