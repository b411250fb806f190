"""The error tree of how work is run.

PipelineError
├── RetryableError       a stage asks for another try: something outside is away
├── PayloadGoneError     a payload was collected, or lies in another store
├── RefusedError         a message that no retry can help: to the dead letters at once
├── ContractError        the run must stop: a promise is broken that no retry can mend
│   └── FoldDivergedError   a fold computed other bytes than those that stand on the log
└── DeadlineError        a wait ended without what it waited for; names it
"""

from __future__ import annotations


class PipelineError(Exception):
    """Root of the errors of this room."""


class RetryableError(PipelineError):
    """Try again later, with backoff, for longer than for an unknown error."""


class PayloadGoneError(PipelineError):
    """The run's store does not hold a payload that a message names."""


class RefusedError(PipelineError):
    """No retry can help."""


class ContractError(PipelineError):
    """The worker stops with this reason rather than guess."""


class FoldDivergedError(ContractError):
    """A fold's output differs from what stands under its key."""


class DeadlineError(RetryableError):
    """What was waited for did not come in time."""
