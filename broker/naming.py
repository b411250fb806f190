"""How a run's streams and subjects are called, and which subject may carry what.

It must not know any server.
"""

from __future__ import annotations

import re
from typing import Final

import msgspec

from broker.errors import PayloadMissingError
from schemas.errors import InvalidIdError
from schemas.ids import check_run_id
from schemas.payload import INLINE, RUN_STORE, PayloadRef, check_payload
from schemas.subjects import check_filter, matches

LOG_PREFIX: Final = "hr"
STATE_PREFIX: Final = "hrs"
PAYLOAD_PREFIX: Final = "hrp"
TALK_PREFIX: Final = "hrt"
"""Heartbeats, metrics and requests: core subjects that no stream keeps."""

MAX_SUBJECT_BYTES: Final = 1500
"""A server closes the connection at a protocol line above 4096 bytes, and a question about a subject names it twice."""
_LITERAL: Final = re.compile(r"[^\s.*>]+(?:\.[^\s.*>]+)*")


class RunNames(msgspec.Struct, frozen=True, kw_only=True):
    """Names of a run's streams and the prefixes of its subjects."""

    run: str
    log_stream: str
    state_stream: str
    payload_stream: str
    log_prefix: str
    state_prefix: str
    payload_prefix: str
    talk_prefix: str


def run_names(run: str) -> RunNames:
    """The names that belong to `run`.

    Raises:
        InvalidIdError: not a run id.
    """
    check_run_id(run)
    return RunNames(
        run=run,
        log_stream=f"HR_{run}",
        state_stream=f"HRS_{run}",
        payload_stream=f"HRP_{run}",
        log_prefix=f"{LOG_PREFIX}.{run}.",
        state_prefix=f"{STATE_PREFIX}.{run}.",
        payload_prefix=f"{PAYLOAD_PREFIX}.{run}.",
        talk_prefix=f"{TALK_PREFIX}.{run}.",
    )


def check_log_subject(names: RunNames, subject: str) -> None:
    """Raise InvalidIdError unless `subject` is one literal subject of the run's log."""
    check_literal(subject)
    if not subject.startswith(names.log_prefix):
        raise InvalidIdError(f"expected a subject under '{names.log_prefix}', found {subject!r}")


def check_literal(subject: str) -> None:
    """Raise InvalidIdError if `subject` has empty tokens, wildcards or white space, or is too long to be sent."""
    if len(subject) > MAX_SUBJECT_BYTES:
        raise InvalidIdError(
            f"expected a subject of at most {MAX_SUBJECT_BYTES} characters, found {len(subject)}: '{subject[:80]}…'; "
            "use a shorter id, for example a digest"
        )
    if not _LITERAL.fullmatch(subject):
        raise InvalidIdError(f"expected a subject without wildcards, spaces and empty tokens, found {subject!r}")


def check_log_filters(names: RunNames, filters: tuple[str, ...]) -> None:
    """Raise InvalidIdError unless each filter lies in the run's log and no two can match the same subject."""
    if not filters:
        raise InvalidIdError(f"expected at least one filter, for example '{names.log_prefix}>', found none")
    for pattern in filters:
        check_filter(pattern)
        if not pattern.startswith(names.log_prefix):
            raise InvalidIdError(f"expected a filter under '{names.log_prefix}', found {pattern!r}")
    for index, first in enumerate(filters):
        for second in filters[index + 1 :]:
            if overlaps(first, second):
                raise InvalidIdError(f"filters {first!r} and {second!r} match the same subjects: keep one of them")


def overlaps(first: str, second: str) -> bool:
    """Whether some subject matches both filters."""
    a, b = first.split("."), second.split(".")
    for x, y in zip(a, b, strict=False):
        if ">" in (x, y):
            return True
        if x != y and "*" not in (x, y):
            return False
    return len(a) == len(b)


def check_talk_subject(subject: str) -> None:
    """Raise InvalidIdError for a subject that a stream would keep: talk is never stored."""
    if subject.split(".", 1)[0] in (LOG_PREFIX, STATE_PREFIX, PAYLOAD_PREFIX):
        raise InvalidIdError(
            f"{subject!r} belongs to a stream: talk (announce, listen, request, serve) needs another first token, "
            f"for example '{TALK_PREFIX}.<run>.…'"
        )


def inline_payload(ref: PayloadRef) -> memoryview | None:
    """The bytes that ride inside `ref`; None if they lie in the run's store.

    Raises:
        PayloadMissingError: they lie in no store that a run has.
        DigestError: the bytes inside differ from the reference.
    """
    if ref.store == INLINE:
        data = ref.inline if ref.inline is not None else memoryview(b"")
        check_payload(ref, data)
        return data
    if ref.store != RUN_STORE:
        raise PayloadMissingError(f"payload {ref.id}: expected the store 'inline' or 'run', found {ref.store!r}")
    return None


def any_matches(filters: tuple[str, ...], subject: str) -> bool:
    """Whether a subject matches one of the filters."""
    return any(matches(pattern, subject) for pattern in filters)
