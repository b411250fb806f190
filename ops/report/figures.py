"""What a report shows, as plain figures."""

from __future__ import annotations

import msgspec

from ops.run_account import RunAccount
from ops.troubles import Trouble


class StepFigures(msgspec.Struct, kw_only=True):
    """One step. Times are Unix seconds, 0: not yet."""

    step: int
    assembled_unix_s: float = 0.0
    trained_unix_s: float = 0.0
    reward: float = 0.0
    """Mean over its groups."""
    reward_by_stream: dict[str, float] = {}
    """Empty where the step's manifest is not kept any more."""
    staleness_max: int = 0
    staleness_mean: float | None = None
    num_rows: int = 0
    num_tokens: int = 0
    seconds: float = 0.0
    """Of its training: rows, update, weights."""
    stats: dict[str, float] = {}
    """Of the update: losses and what belongs to them."""
    skipped: str = ""

    @property
    def is_trained(self) -> bool:
        return self.trained_unix_s > 0


class Hop(msgspec.Struct, frozen=True, kw_only=True):
    """How long one part of the way takes, over the whole run."""

    name: str
    meaning: str
    count: int
    median_s: float
    p95_s: float
    max_s: float


class Rate(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens per second in one span of time."""

    since_start_s: float
    """The middle of the span."""
    sampled_per_s: float
    trained_per_s: float


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """Dead letters of one stage and reason."""

    stage: str
    reason: str
    count: int
    example: str
    """The newest one's error."""
    letter: str
    """Its id, for `headrace dead show`."""


class ReportFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Everything on the page."""

    run: str
    place: str
    headrace_version: str
    estimator: str
    streams: list[str]
    first_unix_s: float
    last_unix_s: float
    num_messages: int
    num_unreadable: int
    """Messages that this version can't decode."""
    num_starts: int
    account: RunAccount
    steps: list[StepFigures]
    num_manifests_missing: int
    hops: list[Hop]
    rates: list[Rate]
    faults: list[Fault]
    rejected_slots: dict[str, int]
    """By reason."""
    controls: list[str]
    """What people asked of the run, with the time."""
    purged_up_to: int = 0
    """Sequence up to which messages may be gone: the account has them, figures by step and by time begin after it."""
    troubles: list[Trouble] = []
    """What was wrong with the run when the report was made, worst first; empty for a run that is over."""
    damages: list[str] = []
    """What of the recording could not be read."""
    gaps: list[tuple[int, int]] = []
    """(first missing, last missing) sequences of the recording."""
