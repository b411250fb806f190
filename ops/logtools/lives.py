"""The life of a group, an episode, a session, a row or a step: what happened to it, when, and what it waited for.

    facts of the log ──▶ events in order, each with the wait before it ──▶ one verdict

Pure: the same facts give the same life. Nothing is guessed; what the log does not say is said to be missing.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from ops.logtools.plain import Plain


class Fate(StrEnum):
    """What became of a thing."""

    TRAINED = "trained"
    DROPPED = "dropped"
    REJECTED = "rejected"
    LATE = "late"
    DEAD = "dead-lettered"
    EVALUATED = "evaluated"
    OPEN = "open"
    UNKNOWN = "unknown"
    """The log does not speak of it."""


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """Something that happened."""

    sequence: int
    time_s: float
    what: str
    detail: str = ""
    who: str = ""
    """The slot, attempt or session it happened to."""
    waited_s: float | None = None
    waited_for: str = ""
    """What the time before it went into."""


class Life(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to `why`."""

    name: str
    kind: str
    run: str
    fate: Fate
    verdict: str
    """One sentence."""
    waits_for: str = ""
    """What it waits for now, when it is open."""
    facts: dict[str, Plain] = {}
    events: list[Event] = []
    problems: list[str] = []
    """What the log holds about it that can't be read or contradicts itself."""
    damages: list[str] = []
    """What of the recording could not be read on the way."""
    gaps: list[tuple[int, int]] = []
    """(first missing, last missing) sequences of the recording."""
