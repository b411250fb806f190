"""What a command says, and how it ends, when it could do its work only in part: a damaged file, messages that are missing."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Final

from ops.logtools.soundness import Soundness

EXIT_INCOMPLETE: Final = 3
"""What could be done is done; something that belongs to it was damaged or missing."""
_SHOWN: Final = 8


def tell_soundness(found: Soundness, problems: Sequence[str] = ()) -> int:
    """Say on stderr what was damaged or missing; the exit code.

    Args:
        problems: what else could not be done.
    """
    if not found.closed:
        _say(["the recording was not closed by its writer: it may end before the log does"])
    _say([f"damaged: {damage}" for damage in found.damages])
    _say([_gap(first, last) for first, last in found.gaps])
    _say(problems)
    return 0 if found.is_whole and not problems else EXIT_INCOMPLETE


def _gap(first: int, last: int) -> str:
    number = last - first + 1
    where = f"sequence {first:,}" if number == 1 else f"sequences {first:,} to {last:,}"
    return f"not in the recording: {where} ({number:,} message{'s' * (number != 1)})"


def _say(lines: Sequence[str]) -> None:
    for line in lines[:_SHOWN]:
        sys.stderr.write(f"headrace: {line}\n")
    if len(lines) > _SHOWN:
        sys.stderr.write(f"headrace: … and {len(lines) - _SHOWN:,} more like it\n")
