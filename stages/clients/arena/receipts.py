"""What a HARNESS_FAILED task's own receipt says about whose doing the failure was. Pure.

The object's shape belongs to the deployment. Read here, from {phase, type|code|error_type|reason} at its top or under `error`:
an error of the agent phase that names the model. Anything else is not the model's, and an object that says two things is neither.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from stages.clients.arena.wire import Json, is_json

_MODEL_KINDS = frozenset(
    ("max_turns", "max_turns_exceeded", "prompt_too_long", "context_length_exceeded", "max_tokens_exceeded")
)
"""Agent-phase errors that only the model's own behaviour causes."""
_KIND_FIELDS = ("type", "code", "error_type", "reason")


class ReceiptVerdict(StrEnum):
    """What a receipt says."""

    ABSENT = "absent"
    MODEL = "model"
    """An agent-phase error that names the model."""
    OTHER = "other"
    """Another phase or another error."""
    MALFORMED = "malformed"
    CONFLICTING = "conflicting"


class Receipt(msgspec.Struct, frozen=True, kw_only=True):
    """A receipt, read."""

    verdict: ReceiptVerdict
    kind: str = ""
    """The error it names."""


def read_receipt(value: object, task_id: str) -> Receipt:
    """Read the receipt of a task; None (no receipt) is ABSENT."""
    if value is None:
        return Receipt(verdict=ReceiptVerdict.ABSENT)
    if is_json(value) and is_json(value.get("data")) and "error" not in value:
        value = value["data"]
    if not is_json(value):
        return Receipt(verdict=ReceiptVerdict.MALFORMED)
    if value.get("task_id") not in (None, task_id):
        return Receipt(verdict=ReceiptVerdict.CONFLICTING)
    places = [value, *([inner] if is_json(inner := value.get("error")) else [])]
    phases = _texts(places, ("phase",))
    kinds = _texts(places, _KIND_FIELDS)
    if phases is None or kinds is None or not phases or not kinds:
        return Receipt(verdict=ReceiptVerdict.MALFORMED)
    named = kinds & _MODEL_KINDS
    if len(phases) > 1 or (named and kinds != named) or len(named) > 1:
        return Receipt(verdict=ReceiptVerdict.CONFLICTING)
    if phases == {"agent"} and named:
        return Receipt(verdict=ReceiptVerdict.MODEL, kind=named.pop())
    return Receipt(verdict=ReceiptVerdict.OTHER, kind=min(kinds))


def _texts(places: list[Json], names: tuple[str, ...]) -> set[str] | None:
    """All values under these names, lower-cased; None where one is no text."""
    found: set[str] = set()
    for place in places:
        for name in names:
            value = place.get(name)
            if value is None:
                continue
            if not isinstance(value, str) or not value:
                return None
            found.add(value.lower())
    return found
