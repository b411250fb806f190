"""Traces: where each message of an episode stands in its trace. Pure; whoever records spans implements `Tracing`.

    episode.requested.G.S.0                    the root: one trace for each slot of a group
    ├── session.closed.G-S-A-T                 a try's session at the gateway
    │   └── interaction.recorded.G-S-A-T.N     a model call
    ├── episode.ended.G.S.A                    the attempt, from its launch to its score
    │   └── episode.requested.G.S.A+1          a further attempt
    └── trajectory.ready.G.S                   its reward

Trace and span ids are digests of the run and the domain ids. So a redelivery, another worker and a replay arrive at the same
ids, and no id has to be carried from stage to stage; the header `traceparent` tells them to readers outside. It must not know
OpenTelemetry.
"""

from __future__ import annotations

import time
from contextvars import ContextVar
from typing import Final, Protocol

import msgspec
import xxhash

from schemas.errors import InvalidIdError
from schemas.subjects import PREFIX, split_subject

HEADER: Final = "traceparent"
_began: Final[ContextVar[int]] = ContextVar("work_began", default=0)


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """A message's span."""

    trace_id: int
    """128 bits, never 0."""
    span_id: int
    """64 bits, never 0."""
    parent_id: int
    """0: the root."""
    name: str
    """The topic."""
    subject: str
    session: str = ""
    """Of the gateway's messages."""


class Tracing(Protocol):
    """Records spans."""

    def said(self, place: Place, began_ns: int) -> None:
        """A message was created: its span is from `began_ns` (Unix time; 0: now) until now."""
        ...


def begin_work() -> None:
    """What is published from here on, in this task and those that it starts, began now."""
    _began.set(time.time_ns())


def work_began_ns() -> int:
    """When the present work began, Unix time; 0 where nobody said."""
    return _began.get()


def traceparent(place: Place) -> str:
    """The W3C header."""
    return f"00-{place.trace_id:032x}-{place.span_id:016x}-01"


def place_of(subject: str) -> Place | None:
    """Where a message stands in its episode's trace; None for messages that are about no single episode.

    Args:
        subject: of a control message.
    """
    try:
        parts = split_subject(subject)
    except InvalidIdError:
        return None
    key, topic, run = parts.key, parts.topic, parts.run
    session = ""
    match topic, key:
        case "episode.requested", (group, slot, "0"):
            parent = ""
        case "episode.requested", (group, slot, attempt) if attempt.isdecimal():
            parent = _subject(run, "episode.ended", group, slot, str(int(attempt) - 1))
        case (("episode.launched" | "episode.accepted" | "episode.ended"), (group, slot, attempt, *_)):
            parent = _subject(run, "episode.requested", group, slot, attempt)
        case "trajectory.ready", (group, slot):
            parent = _subject(run, "episode.requested", group, slot, "0")
        case (("session.opened" | "session.closed" | "session.rewarded" | "interaction.recorded"), (session, *_)):
            ids = session.rsplit("-", 3)
            if len(ids) != 4:
                return None
            group, slot, attempt, _try = ids
            closed = _subject(run, "session.closed", session)
            parent = (
                closed if topic == "interaction.recorded" else _subject(run, "episode.requested", group, slot, attempt)
            )
        case _:
            return None
    return Place(
        trace_id=xxhash.xxh3_128_intdigest(f"{run}/{group}/{slot}".encode()) or 1,
        span_id=_span_id(subject),
        parent_id=_span_id(parent) if parent else 0,
        name=topic,
        subject=subject,
        session=session,
    )


def _span_id(subject: str) -> int:
    return xxhash.xxh3_64_intdigest(subject.encode()) or 1


def _subject(run: str, topic: str, *key: str) -> str:
    return ".".join((PREFIX, run, topic, *key))
