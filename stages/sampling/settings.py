"""What the sampling fold depends on besides the log; fixed for a run."""

from __future__ import annotations

from typing import Literal

import msgspec

from stages.sampling.evaluation import EvaluationStream
from stages.sampling.open_streams import OpenStreamSettings


class SamplingSettings(msgspec.Struct, frozen=True, kw_only=True):
    """See the module."""

    streams: tuple[str, ...]
    """The streams that must be listed before the first group is issued."""
    open_streams: tuple[OpenStreamSettings, ...] = ()
    """The streams whose rows are drawn as they are published."""
    groups_per_step: int
    slots_per_group: int
    max_staleness: int
    max_concurrent_groups: int
    order: Literal["smallest_next", "quota"] = "smallest_next"
    """How the listed streams share an epoch."""
    epoch_size_groups: int = 0
    seed: int | None = None
    """Shuffle seed; None keeps the source order."""
    group_deadline_s: float | None = None
    tick_period_s: float = 2.0
    trains: bool = True
    """False: nothing is trained, so a closed group waits for nothing."""
    evaluations: tuple[EvaluationStream, ...] = ()
    """Streams that are run every so many versions and never trained on."""
