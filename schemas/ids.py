"""Ids and the tokens that carry them inside a subject.

A subject token may hold `[A-Za-z0-9_-]` only: a dot, a space, `*` or `>` inside an id would silently change what a
filter matches. Ids of this project's own making are safe as they are; foreign ids are encoded reversibly.
"""

from __future__ import annotations

import re

from schemas.errors import InvalidIdError

_SAFE = re.compile(r"[A-Za-z0-9_-]+")
_ESCAPE = "="
# `=` is legal in a subject token and in none of our own ids, so it can introduce an escaped byte.
_ENCODED = re.compile(r"(?:[A-Za-z0-9_-]|=[0-9A-F]{2})+")


def is_safe_token(text: str) -> bool:
    """Whether `text` can stand in a subject as it is."""
    return _SAFE.fullmatch(text) is not None


def encode_token(text: str) -> str:
    """One legal subject token for any non-empty id; `decode_token` gives the id back.

    Raises:
        InvalidIdError: the id is empty.
    """
    if not text:
        raise InvalidIdError("an id must not be empty: expected at least one character, found ''")
    if _SAFE.fullmatch(text):
        return text
    return "".join(chr(byte) if _SAFE.fullmatch(chr(byte)) else f"{_ESCAPE}{byte:02X}" for byte in text.encode("utf-8"))


def decode_token(token: str) -> str:
    """The id that `encode_token` made this token from.

    Raises:
        InvalidIdError: not a token that `encode_token` can have made.
    """
    if _SAFE.fullmatch(token):
        return token
    if not _ENCODED.fullmatch(token):
        raise InvalidIdError(f"expected letters, digits, '_', '-' or '=XX' escapes, found {token!r}")
    raw = bytearray()
    position = 0
    while position < len(token):
        if token[position] == _ESCAPE:
            raw.append(int(token[position + 1 : position + 3], 16))
            position += 3
        else:
            raw += token[position].encode("ascii")
            position += 1
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidIdError(f"expected escaped UTF-8, found {token!r}") from error


def check_run_id(run: str) -> str:
    """`run` itself, if it can name streams and subjects.

    Raises:
        InvalidIdError: anything but 1 to 64 letters, digits, '_' or '-'.
    """
    if not _SAFE.fullmatch(run) or len(run) > 64:
        raise InvalidIdError(f"a run id is 1 to 64 letters, digits, '_' or '-': found {run!r}")
    return run


def group_id(ordinal: int) -> str:
    """The id of the run's `ordinal`-th issued group (from 0); ids sort in the order of issue."""
    return f"g{ordinal:07d}"


def group_ordinal(group: str) -> int | None:
    """The ordinal that `group_id` made this id of; None for another id."""
    return int(group[1:]) if group[:1] == "g" and group[1:].isdecimal() else None


def session_id(group: str, slot: int, attempt: int, launch_try: int) -> str:
    """The gateway session of one try of one attempt at a slot."""
    return f"{group}-{slot}-{attempt}-{launch_try}"


def row_id(group: str, slot: int, row: int) -> str:
    """The id of the `row`-th training row that a slot gave."""
    return f"{group}-{slot}-{row}"
