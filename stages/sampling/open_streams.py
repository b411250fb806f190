"""Open streams: rows are drawn as they are published, once each, in the order of the log. Pure.

An open stream has no epochs and no shuffle. It takes turns with the other open streams and with all listed streams together
(whose weight is the sum of theirs): the next turn is that of the smallest ((turns had + 1) / weight, name), in whole
numbers. A stream that has no row when its turn comes either lets it pass, and is owed nothing later, or the others wait for
it. A turn that passes is counted, so that nothing leaves the weights unseen.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Final

import msgspec

from schemas.config_arena import WhenEmpty
from schemas.messages.sampling import PromptPublished, StreamRow

LISTED: Final = ""
"""The listed streams together, as one of those that take turns."""
_REMEMBERED: Final = 16_384
"""Ids by which a prompt that is said again is known. The broker refuses it too, as long as the first stands on the log."""
_COMPACT_AFTER: Final = 1024


class OpenStreamSettings(msgspec.Struct, frozen=True, kw_only=True):
    """One open stream of a run's config."""

    name: str
    weight: float
    """Finite and > 0."""
    when_empty: WhenEmpty = WhenEmpty.PASS


class OpenStream(msgspec.Struct, kw_only=True):
    """Where an open stream stands; checkpointed."""

    rows: list[StreamRow] = []
    """Published rows; those before `head` are drawn."""
    head: int = 0
    ids: dict[str, None] = {}
    """Of the newest rows, drawn or not."""
    turns: int = 0
    """Turns it had, those that passed included."""
    passed: int = 0
    """Turns that came when it had no row."""
    closed: bool = False
    """It takes no more rows."""

    @property
    def num_waiting(self) -> int:
        """Rows that are published and not drawn."""
        return len(self.rows) - self.head

    @property
    def over(self) -> bool:
        """Closed, and every row is drawn."""
        return self.closed and self.num_waiting == 0


def add_row(stream: OpenStream, message: PromptPublished) -> None:
    """Take a published prompt up, unless its id is known or the stream is closed."""
    if stream.closed or message.data_id in stream.ids:
        return
    stream.ids[message.data_id] = None
    if len(stream.ids) > _REMEMBERED:
        del stream.ids[next(iter(stream.ids))]
    stream.rows.append(StreamRow(data_id=message.data_id, tags=message.tags, payload=message.prompt))


def take_row(stream: OpenStream) -> StreamRow:
    """The oldest row that is not drawn, drawn."""
    row = stream.rows[stream.head]
    stream.head += 1
    if stream.head >= _COMPACT_AFTER and 2 * stream.head >= len(stream.rows):
        del stream.rows[: stream.head]
        stream.head = 0
    return row


class Taker(msgspec.Struct, frozen=True, kw_only=True):
    """One of those that take turns."""

    name: str
    """A stream's, or LISTED."""
    weight: Fraction
    turns: int
    """Had so far."""
    ready: bool
    """Has a row."""
    waited_for: bool
    """The others wait when its turn comes and it has no row."""


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """Whose turn it is."""

    name: str | None
    """None: nobody's, or one is waited for."""
    waits_for: tuple[str, ...] = ()
    """Streams without a row that must have one first."""
    passed: Mapping[str, int] = {}
    """Stream without a row → turns of it that pass now."""


def takers(
    settings: Sequence[OpenStreamSettings],
    streams: Mapping[str, OpenStream],
    *,
    listed_weights: Sequence[float],
    listed_turns: int,
) -> list[Taker]:
    """Those that take turns now: open streams that are not over, and the listed ones together."""
    found = [
        Taker(
            name=one.name,
            weight=_exact(one.weight),
            turns=stream.turns,
            ready=stream.num_waiting > 0,
            waited_for=one.when_empty is WhenEmpty.WAIT,
        )
        for one in settings
        if not (stream := streams.get(one.name) or OpenStream()).over
    ]
    if listed_weights:
        weight = sum((_exact(weight) for weight in listed_weights), Fraction(0))
        found.append(Taker(name=LISTED, weight=weight, turns=listed_turns, ready=True, waited_for=False))
    return found


def next_turn(among: Sequence[Taker]) -> Turn:
    """Whose turn it is, and which turns pass before it."""
    empty = [taker for taker in among if not taker.ready]
    ready = [taker for taker in among if taker.ready]
    if not ready:
        return Turn(name=None, waits_for=tuple(taker.name for taker in empty))
    chosen = min(ready, key=_due)
    before = [taker for taker in empty if _due(taker) < _due(chosen)]
    waited_for = tuple(taker.name for taker in before if taker.waited_for)
    if waited_for:
        return Turn(name=None, waits_for=waited_for)
    return Turn(name=chosen.name, passed={taker.name: _turns_before(taker, chosen) for taker in before})


def _due(taker: Taker) -> tuple[Fraction, str]:
    return (taker.turns + 1) / taker.weight, taker.name


def _turns_before(taker: Taker, chosen: Taker) -> int:
    """How many of a stream's turns come before the next turn of another."""
    until, name = _due(chosen)
    number = math.floor(until * taker.weight)
    if number == until * taker.weight and taker.name > name:
        number -= 1
    return number - taker.turns


def _exact(weight: float) -> Fraction:
    return Fraction(repr(float(weight)))
