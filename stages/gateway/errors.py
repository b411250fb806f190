"""What the gateway refuses, with the status that a client understands. Protocols give each its own shape.

GatewayError
├── InvalidRequestError         400: the body can't be used
├── ContextLengthExceededError  400: the prompt leaves no room to answer
├── UnauthorizedError           401: no or a foreign session token
├── ForbiddenError              403: this key may not do that
├── UnknownRouteError           404 or 405
├── SlowRequestError            408: the body did not arrive in time
├── SessionEndedError           410 (400 for clients that retry a 410)
├── TooLargeError               413
├── BusyError                   429 with retry-after
├── InternalError               500: a fault of the gateway itself
├── EngineFaultError            502: the engine answered what can't be right
└── UnavailableError            503: no engine, store or other gateway answered in time
"""

from __future__ import annotations

from typing import ClassVar


class GatewayError(Exception):
    """Root: something the client is told, with a status and a code."""

    status: ClassVar[int] = 500
    code: ClassVar[str] = "internal_error"

    def __init__(self, message: str, *, retry_after_s: int | None = None, status: int | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.retry_after_s = retry_after_s
        self.http_status = status if status is not None else self.status


class ClientGoneError(Exception):
    """The client closed the connection: nobody is told, and nothing is wrong."""


class InvalidRequestError(GatewayError):
    """A body that can't be used: the same request will fail again."""

    status = 400
    code = "invalid_request"


class ContextLengthExceededError(GatewayError):
    """The prompt leaves no room for a single token below the engine's context."""

    status = 400
    code = "context_length_exceeded"

    def __init__(self, num_tokens: int, max_tokens: int) -> None:
        # Claude Code compacts its history on exactly this beginning.
        super().__init__(f"prompt is too long: {num_tokens} tokens > {max_tokens} maximum")


class UnauthorizedError(GatewayError):
    """No session token, an unknown one, or another session's."""

    status = 401
    code = "invalid_session_token"


class ForbiddenError(GatewayError):
    """A key that is good for something else."""

    status = 403
    code = "forbidden"


class UnknownRouteError(GatewayError):
    """Nothing is served there."""

    status = 404
    code = "not_found"


class SlowRequestError(GatewayError):
    """The body did not arrive within the deadline."""

    status = 408
    code = "request_timeout"


class SessionEndedError(GatewayError):
    """The session is over: nothing is sampled or recorded for it any more."""

    status = 410
    code = "session_ended"


class TooLargeError(GatewayError):
    """A body above the limit."""

    status = 413
    code = "request_too_large"


class BusyError(GatewayError):
    """No credit for a new session, or too many calls are waiting."""

    status = 429
    code = "rate_limit_exceeded"


class InternalError(GatewayError):
    """A fault of the gateway itself."""


class EngineFaultError(GatewayError):
    """The engine answered something that can't be right."""

    status = 502
    code = "engine_fault"


class UnavailableError(GatewayError):
    """No engine, store or gateway answered in time."""

    status = 503
    code = "unavailable"
