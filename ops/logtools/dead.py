"""`headrace dead`: the messages that stages gave up: listed, shown, sent again as a new attempt, dropped.

A retry is a message of its own, addressed to the stage that gave the letter up (pipeline.retries): nobody else sees it,
and what the stage makes of it is created once as ever. A letter is never deleted: dropping it says so on the log.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final

import msgspec

from broker.api import Broker
from ops.logtools.plain import Plain, moment, plain
from ops.logtools.sources import LiveSource, LogSource, tell
from pipeline.log import RunLog
from schemas.errors import DecodeError, InvalidIdError
from schemas.messages.sampling import DeadDropped, DeadLetter, DeadRetry
from schemas.subjects import PREFIX, split_subject
from schemas.topics import topic_named


class LetterState(StrEnum):
    """Where a letter stands."""

    OPEN = "open"
    """Nobody has done anything about it."""
    RETRIED = "retried"
    """Sent again; its stage has not come to it yet, or that can't be seen from here."""
    HANDLED = "handled"
    """Sent again, and its stage has dealt with it."""
    FAILED_AGAIN = "failed again"
    """Sent again and given up again: see the newer letter."""
    DROPPED = "dropped"


class Letter(msgspec.Struct, frozen=True, kw_only=True):
    """A dead letter and what became of it."""

    id: str
    """stage:sequence, as the commands take it."""
    state: LetterState
    stage: str
    sequence: int
    subject: str
    topic: str
    key: list[str]
    reason: str
    error: str
    attempts: int
    time: str
    retries: int
    letter: DeadLetter
    last_retry_sequence: int = 0


class NoSuchLetterError(InvalidIdError):
    """No dead letter of that id."""


async def letters(source: LogSource, *, everything: bool = False) -> list[Letter]:
    """The letters in the order of the log.

    Args:
        everything: also those that were dropped, handled, or followed by a newer letter.
    """
    found: dict[tuple[str, int], tuple[DeadLetter, float]] = {}
    retries: dict[tuple[str, int], list[int]] = {}
    drops: set[tuple[str, int]] = set()
    async for record in source.read([f"{PREFIX}.{source.run}.dead.>"]):
        match tell(record).message:
            case DeadLetter() as letter:
                found.setdefault((letter.stage, letter.sequence), (letter, record.unix_time_s))
            case DeadRetry() as retry:
                retries.setdefault((retry.stage, retry.sequence), []).append(record.sequence)
            case DeadDropped() as drop:
                drops.add((drop.stage, drop.sequence))
            case _:
                pass
    floors = await _floors(source)
    listed = [
        _letter(letter, time_s, retries.get(key, []), key in drops, found, floors)
        for key, (letter, time_s) in found.items()
    ]
    closed = (LetterState.DROPPED, LetterState.HANDLED, LetterState.FAILED_AGAIN)
    return [letter for letter in listed if everything or letter.state not in closed]


async def _floors(source: LogSource) -> dict[str, int]:
    """Up to which sequence each stage has dealt with everything; folds and recordings say nothing."""
    if not isinstance(source, LiveSource):
        return {}
    return {status.durable: status.ack_floor for status in await source.broker.consumers()}


def _letter(
    letter: DeadLetter,
    time_s: float,
    retries: list[int],
    dropped: bool,
    others: dict[tuple[str, int], tuple[DeadLetter, float]],
    floors: dict[str, int],
) -> Letter:
    if dropped:
        state = LetterState.DROPPED
    elif not retries:
        state = LetterState.OPEN
    elif (letter.stage, retries[-1]) in others:
        state = LetterState.FAILED_AGAIN
    elif floors.get(letter.stage, 0) >= retries[-1]:
        state = LetterState.HANDLED
    else:
        state = LetterState.RETRIED
    try:
        parts = split_subject(letter.subject)
        topic, key = parts.topic, list(parts.key)
    except InvalidIdError:
        topic, key = letter.subject, []
    return Letter(
        id=f"{letter.stage}:{letter.sequence}",
        state=state,
        stage=letter.stage,
        sequence=letter.sequence,
        subject=letter.subject,
        topic=topic,
        key=key,
        reason=letter.reason,
        error=letter.error,
        attempts=letter.attempts,
        time=moment(time_s),
        retries=len(retries),
        letter=letter,
        last_retry_sequence=retries[-1] if retries else 0,
    )


async def find_letter(source: LogSource, name: str) -> Letter:
    """The letter of an id: `stage:sequence`, or the sequence alone where only one stage gave it up.

    Raises:
        NoSuchLetterError: none, or several.
    """
    stage, _, number = name.rpartition(":")
    found = [
        letter
        for letter in await letters(source, everything=True)
        if str(letter.sequence) == number and (not stage or letter.stage == stage)
    ]
    if len(found) == 1:
        return found[0]
    if found:
        raise NoSuchLetterError(
            f"{name}: several stages gave this message up: {', '.join(letter.id for letter in found)}"
        )
    raise NoSuchLetterError(f"{name}: no dead letter of that id in {source.place}; `headrace dead list` shows them")


def content(letter: Letter) -> dict[str, Plain]:
    """A letter with its message, decoded where that is possible."""
    message: Plain = None
    problem = ""
    topic = topic_named(letter.topic)
    try:
        message = plain(letter.letter.data if topic is None else topic.decode(letter.letter.data))
    except DecodeError as error:
        problem = str(error)
    shown = msgspec.structs.asdict(letter)
    del shown["letter"]
    return {
        **{name: plain(value) for name, value in shown.items()},
        "message": message,
        "undecodable": problem,
        "size_bytes": len(letter.letter.data),
        "first_bytes": letter.letter.data[:64].hex(" "),
    }


_RETRIES_LIMIT: Final = 1000


async def retry(broker: Broker, letter: Letter, *, mended: bytes | None = None) -> DeadRetry:
    """Send a letter's message again to its stage, as a new attempt.

    Args:
        mended: other bytes to handle in its place.

    Raises:
        DecodeError: mended bytes that are no message of its topic.
    """
    topic = topic_named(letter.topic)
    if mended is not None and topic is not None:
        topic.decode(mended)
    log = RunLog(broker)
    for attempt in range(letter.retries + 1, letter.retries + _RETRIES_LIMIT):
        wanted = DeadRetry(
            stage=letter.stage,
            sequence=letter.sequence,
            attempt=attempt,
            subject=letter.subject,
            data=letter.letter.data if mended is None else mended,
        )
        if await log.publish(wanted) == wanted:
            return wanted
    raise NoSuchLetterError(f"{letter.id}: was retried {_RETRIES_LIMIT} times meanwhile")


async def drop(broker: Broker, letter: Letter, *, reason: str = "") -> DeadDropped:
    """Say that a letter needs nothing more; what stands if somebody said so before."""
    return await RunLog(broker).publish(DeadDropped(stage=letter.stage, sequence=letter.sequence, reason=reason))
