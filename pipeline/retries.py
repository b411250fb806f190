"""Retries of dead letters: who reads them. A retry is a message of its own on the log, addressed to one stage or fold, so
nobody else of the message's topic sees it twice and the log's one order says when it was handled again.
"""

from __future__ import annotations

from schemas.ids import encode_token
from schemas.subjects import PREFIX
from schemas.topics import DEAD_RETRY

_TOKENS = tuple(DEAD_RETRY.name.split("."))


def retries_of(run: str, stage: str) -> str:
    """The filter of the retries that are addressed to a stage or fold."""
    return f"{PREFIX}.{run}.{DEAD_RETRY.name}.{encode_token(stage)}.>"


def original(run: str, subject: str, data: bytes) -> tuple[str, bytes]:
    """Subject and bytes of the message that a record stands for: its own, or for a retry those of the dead letter.

    Raises:
        DecodeError: a retry that can't be read.
    """
    if not is_retry(subject):
        return subject, data
    retry = DEAD_RETRY.decode_at(run, subject, data)
    return retry.subject, retry.data


def is_retry(subject: str) -> bool:
    """Whether a subject is that of a retry."""
    return tuple(subject.split(".", 4)[2:4]) == _TOKENS
