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


def is_retry(subject: str) -> bool:
    """Whether a subject is that of a retry."""
    return tuple(subject.split(".", 4)[2:4]) == _TOKENS
