"""JetStream's JSON questions: asked again until they are answered or the deadline is over. Safe to repeat, all of them.

It must not know runs.
"""

from __future__ import annotations

import time
from enum import IntEnum
from typing import TypeVar

import anyio
import msgspec

from broker.errors import BrokerError, NotConnectedError
from broker.jetstream.headers import status_of
from broker.jetstream.link import Link, LinkLostError, NoAnswerError
from broker.jetstream.questions import Again

RETRY_WAIT_S = 0.1
AGAIN_S = 1.0
"""An unanswered question is asked again after so long, or after `request_timeout_s` where that is less: it is small, and a
cluster that had no leader has one perhaps."""
T = TypeVar("T", bound=msgspec.Struct)


class Code(IntEnum):
    """The server's error codes that make a difference here."""

    NO_PEERS = 10005
    """Fewer servers are there than copies are wanted."""
    NO_MESSAGE = 10037
    CONSUMER_NOT_FOUND = 10014
    INSUFFICIENT_STORAGE = 10047
    STREAM_NOT_FOUND = 10059
    WRONG_LAST_SEQUENCE = 10071
    STORE_FAILED = 10077
    """Limits of the stream: bytes, messages, or messages of one subject."""
    DUPLICATE_IN_PROCESS = 10158
    """A cluster is still agreeing on an earlier try with this message id."""
    WRONG_LAST_SEQUENCE_IN_PROCESS = 10164
    """A cluster is still agreeing on another message of this subject."""
    TOO_MANY_REQUESTS = 10167
    NO_SPACE = 10023
    CONSUMER_EXISTS = 10148


class ErrorBody(msgspec.Struct, frozen=True):
    """How the server says no."""

    code: int = 0
    err_code: int = 0
    description: str = ""


class ErrorAnswer(msgspec.Struct, frozen=True):
    """Any answer, read for its error only."""

    error: ErrorBody | None = None


class ApiError(BrokerError):
    """The server said no."""

    def __init__(self, subject: str, body: ErrorBody) -> None:
        super().__init__(f"{subject}: {body.description} ({body.err_code or body.code})")
        self.err_code = body.err_code
        self.description = body.description


_error_decoder = msgspec.json.Decoder(ErrorAnswer)


async def call(link: Link, subject: str, body: object, kind: type[T], *, deadline_s: float | None = None) -> T:
    """Ask `$JS.API.<subject>` and decode the answer.

    Raises:
        ApiError: the server said no.
        NotConnectedError: no answer within the deadline.
    """
    data = b"" if body is None else msgspec.json.encode(body)
    limit_s = link.settings.publish_deadline_s if deadline_s is None else deadline_s
    until_s = time.monotonic() + limit_s
    patience_s = min(AGAIN_S, link.settings.request_timeout_s)
    while True:
        left_s = max(0.0, until_s - time.monotonic())
        await link.wait_connected(left_s)
        try:
            answer = await link.ask(f"$JS.API.{subject}", data, timeout_s=left_s, again=Again(patience_s, patience_s))
        except (LinkLostError, NoAnswerError):
            reason = "no answer"
        else:
            if status_of(answer.headers) != 503:
                error = _error_decoder.decode(answer.data).error
                if error is None:
                    return msgspec.json.decode(answer.data, type=kind)
                if error.code != 503 or error.err_code == Code.NO_SPACE:
                    raise ApiError(subject, error)
            reason = "JetStream is not available"
        if time.monotonic() >= until_s:
            raise NotConnectedError(f"{subject}: expected an answer within {limit_s} s, found: {reason}")
        await anyio.sleep(RETRY_WAIT_S)
