"""The error tree of the Arena client. Retryable or not is the type; no text ever holds a credential.

ArenaError
├── ArenaRetryableError          (pipeline.RetryableError)
│   ├── ArenaConnectionError     no answer, after all tries
│   ├── ArenaBusyError           429 or 5xx, after all tries
│   └── ArenaLaunchLostError     a launch whose answer was lost: it may run; try again with a new session only
└── ArenaFatalError              (pipeline.RefusedError)
    ├── ArenaRefusedError        another 4xx; `status` says which
    │   ├── ArenaAuthError       401, 403
    │   └── ArenaNotFoundError   404
    ├── ArenaContractError       an answer that breaks the API's rules
    │   ├── DatasetPagingError   names stream, page and values
    │   └── TaskResultError      a terminal result that can't be used
    └── RewardDriftError         another reward scores the stream than the run expects
"""

from __future__ import annotations

from pipeline.errors import RefusedError, RetryableError

ERROR_TEXT_LIMIT = 500
"""Characters of an Arena's own words that an error may quote."""


class ArenaError(Exception):
    """Root of the client's errors."""


class ArenaRetryableError(ArenaError, RetryableError):
    """The same may work later."""


class ArenaConnectionError(ArenaRetryableError):
    """The Arena gave no answer, after all tries."""


class ArenaBusyError(ArenaRetryableError):
    """The Arena answered 429 or 5xx, after all tries."""

    def __init__(self, message: str, *, status: int, retry_after: str | None = None) -> None:
        """Args:
        message: What was asked and answered.
        status: Of the last answer.
        retry_after: Its header of that name, as it came.
        """
        super().__init__(message)
        self.status = status
        self.retry_after = retry_after


class ArenaLaunchLostError(ArenaRetryableError):
    """A launch was sent and its answer lost: a task may run that nobody will poll."""


class ArenaFatalError(ArenaError, RefusedError):
    """No repetition helps."""


class ArenaRefusedError(ArenaFatalError):
    """The Arena refused the request."""

    def __init__(self, message: str, *, status: int) -> None:
        super().__init__(message)
        self.status = status


class ArenaAuthError(ArenaRefusedError):
    """The Arena refused our credentials."""


class ArenaNotFoundError(ArenaRefusedError):
    """The Arena doesn't know it."""


class ArenaContractError(ArenaFatalError):
    """An answer breaks the API's rules."""


class DatasetPagingError(ArenaContractError):
    """A stream's pages contradict each other."""


class TaskResultError(ArenaContractError):
    """A task's result breaks the API's rules."""


class RewardDriftError(ArenaFatalError):
    """The reward that scores a stream is not the expected one."""
