"""What differs between two messages of one key: field by field, through payloads that are known here."""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum

import msgspec
import numpy as np

from ops.logtools.plain import Plain, plain
from schemas.arrays import Array, Bits, Runs
from schemas.payload import PayloadRef

_FIELDS_SHOWN = 40


class DifferenceKind(StrEnum):
    """How an output differs from the recorded one."""

    CHANGED = "changed"
    MISSING = "missing"
    """Recorded, and today's code does not make it."""
    EXTRA = "extra"
    """Made by today's code, and not recorded."""
    FAILED = "failed"
    """Today's code can't make it from what is recorded."""


class FieldDifference(msgspec.Struct, frozen=True, kw_only=True):
    """One field of an output."""

    path: str
    recorded: Plain
    now: Plain


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """One output that differs."""

    topic: str
    key: str
    kind: DifferenceKind
    fields: list[FieldDifference] = []
    reason: str = ""


class Compared(msgspec.Struct, frozen=True, kw_only=True):
    """One output that was compared: equal when `difference` is None."""

    topic: str
    key: str
    difference: Difference | None = None


class DiffReport(msgspec.Struct, frozen=True, kw_only=True):
    """The result of `headrace replay FILE --stage S --diff`."""

    stage: str
    recording: str
    run: str
    compared: int
    """Recorded outputs that today's code was held against."""
    differences: int
    changed: list[Difference]
    """All of them, of whatever kind."""
    nothing: str = ""
    """Why there was nothing to compare; empty when something was compared."""
    damages: list[str] = []
    """What of the recording could not be read on the way."""
    gaps: list[tuple[int, int]] = []
    """(first missing, last missing) sequences of the recording."""
    unfinished: list[str] = []
    """What the recording breaks off in: inputs whose output it does not hold, named with what is missing."""
    overrides: list[str] = []


def field_differences(recorded: msgspec.Struct, now: msgspec.Struct) -> list[FieldDifference]:
    """The fields in which two messages differ; the first 40 of them."""
    found: list[FieldDifference] = []
    for difference in _walk(recorded, now, ""):
        found.append(difference)
        if len(found) == _FIELDS_SHOWN:
            break
    return found


def _walk(recorded: object, now: object, path: str) -> Iterator[FieldDifference]:
    match recorded, now:
        case ((Array() | Bits() | Runs()), (Array() | Bits() | Runs())):
            yield from _arrays(recorded, now, path)
        case PayloadRef(), PayloadRef():
            if recorded.id != now.id:
                yield FieldDifference(path=path, recorded=recorded.id, now=now.id)
        case msgspec.Struct(), msgspec.Struct() if type(recorded) is type(now):
            for name in recorded.__struct_fields__:
                yield from _walk(getattr(recorded, name), getattr(now, name), f"{path}.{name}" if path else name)
        case list(), list():
            a: list[object] = recorded
            b: list[object] = now
            if len(a) != len(b):
                yield FieldDifference(path=f"{path}.length", recorded=len(a), now=len(b))
            for number, (x, y) in enumerate(zip(a, b, strict=False)):
                yield from _walk(x, y, f"{path}[{number}]")
        case dict(), dict():
            left: dict[object, object] = recorded
            right: dict[object, object] = now
            for key in sorted({*left, *right}, key=str):
                yield from _walk(left.get(key), right.get(key), f"{path}.{key}")
        case _:
            if recorded != now:
                yield FieldDifference(path=path, recorded=plain(recorded), now=plain(now))


def _arrays(recorded: Array | Bits | Runs, now: Array | Bits | Runs, path: str) -> Iterator[FieldDifference]:
    a, b = recorded.as_numpy(), now.as_numpy()
    if len(a) != len(b):
        yield FieldDifference(path=f"{path}.length", recorded=len(a), now=len(b))
        return
    for number in np.flatnonzero(a != b).tolist():
        yield FieldDifference(path=f"{path}[{number}]", recorded=plain(a[number].item()), now=plain(b[number].item()))
