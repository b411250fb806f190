"""`headrace tap`: what is said on the log now, decoded, as much as a person can read.

It reads the log beside everybody else (no durable, no acknowledgement), so no message is taken, delayed or delivered
again. When there is more than may be shown, it closes its reader, waits for the next second and goes on at the log's end:
a tap costs a busy pipeline a few hundred messages a second, not a second copy of the log.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Final

import anyio
import msgspec

from broker.api import Broker, Record
from broker.naming import any_matches
from broker.recording.blocks import topic_and_entity
from ops.logtools.expressions import Expression, Value
from ops.logtools.names import Kind, Subject
from ops.logtools.plain import Plain, clock, plain
from ops.logtools.sources import Told, apart, tell
from schemas.errors import ConfigError
from schemas.messages.sampling import DeadLetter
from schemas.subjects import PREFIX

WINDOW_S: Final = 1.0


class TapSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How much a tap shows."""

    per_second: int = 50
    """Messages shown a second; the rest is counted."""
    scanned_per_second: int = 2000
    """Messages looked at a second for those that --where lets through."""
    limit: int | None = None
    """End after so many messages."""
    from_start: bool = False
    """Begin with the log's first message and pass over nothing until its present end is reached."""
    follow: bool = True
    """Go on with what comes; False only with `from_start`: end at the log's present end."""


class Tapped(msgspec.Struct, frozen=True, kw_only=True):
    """A message that was seen."""

    sequence: int
    time_s: float
    topic: str
    key: str
    subject: str
    size_bytes: int
    fields: dict[str, Plain]
    """The message's fields; `error` when it can't be decoded."""


class LeftOut(msgspec.Struct, frozen=True, kw_only=True):
    """How far the tap jumped, because there was more than it may show."""

    after_sequence: int
    to_sequence: int

    @property
    def num_messages(self) -> int:
        """Messages of the whole log that were passed over."""
        return self.to_sequence - self.after_sequence


class Rates(msgspec.Struct, frozen=True, kw_only=True):
    """Messages and bytes a second by topic."""

    seconds: float
    messages: dict[str, float]
    size_bytes: dict[str, float]


async def tap(
    broker: Broker,
    filters: Sequence[str],
    settings: TapSettings,
    *,
    where: Expression | None = None,
    only: Callable[[Told], bool] | None = None,
) -> AsyncIterator[Tapped | LeftOut]:
    """What comes from now on, or from the log's start. Close the iterator to end.

    Args:
        where: only messages that satisfy it.
        only: a test of the decoded message; with it nothing is passed over.
    """
    wanted = tuple(filters)
    patterns = apart(wanted)
    stands_to = (await broker.log_status()).last_sequence
    position = 0 if settings.from_start else stands_to
    num_shown = 0
    while True:
        window = _Window(settings, bounded=only is None)
        async with broker.read(patterns, after_sequence=position, follow=settings.follow) as records:
            async for record in records:
                position = record.sequence
                if not any_matches(wanted, record.subject):
                    continue
                told = tell(record)
                if only is not None and not only(told):
                    continue
                seen = tapped(told)
                if where is None or where.matches(named(seen)):
                    yield seen
                    num_shown += 1
                    if num_shown == settings.limit:
                        return
                    window.shown += 1
                window.scanned += 1
                if position > stands_to and window.is_full():
                    break
        if not settings.follow:
            return
        await window.wait()
        last = (await broker.log_status()).last_sequence
        if last > position:
            yield LeftOut(after_sequence=position, to_sequence=last)
            position = last


class _Window:
    """One second of showing. It begins anew with the first message after its end."""

    def __init__(self, settings: TapSettings, *, bounded: bool) -> None:
        self.shown = 0
        self.scanned = 0
        self._settings: Final = settings
        self._bounded: Final = bounded
        self._ends_s = anyio.current_time() + WINDOW_S

    def is_full(self) -> bool:
        """Whether nothing more may be shown before the window's end."""
        now = anyio.current_time()
        if now >= self._ends_s:
            self.shown = self.scanned = 0
            self._ends_s = now + WINDOW_S
            return False
        settings = self._settings
        return self._bounded and (self.shown >= settings.per_second or self.scanned >= settings.scanned_per_second)

    async def wait(self) -> None:
        """Until the window's end."""
        await anyio.sleep(max(0.0, self._ends_s - anyio.current_time()))


def tapped(told: Told) -> Tapped:
    """A decoded record as it is shown."""
    record = told.record
    topic = topic_and_entity(record.subject)[0]
    value: Plain = {"error": told.error} if told.message is None else plain(told.message)
    return Tapped(
        sequence=record.sequence,
        time_s=record.unix_time_s,
        topic=topic,
        key=record.subject.split(".", 4)[-1],
        subject=record.subject,
        size_bytes=len(record.data),
        fields=value if isinstance(value, dict) else {},
    )


def named(seen: Tapped) -> dict[str, Value]:
    """The names that `--where` and `--fields` may use."""
    return {
        "subject": seen.subject,
        "topic": seen.topic,
        "key": seen.key,
        "sequence": seen.sequence,
        "time": clock(seen.time_s),
        "size_bytes": seen.size_bytes,
        **seen.fields,
    }


def chosen(seen: Tapped, paths: Sequence[str]) -> dict[str, Plain]:
    """The fields of some dotted paths; None where a message has no such field."""
    values = named(seen)
    found: dict[str, Plain] = {}
    for path in paths:
        value: Plain = values
        for part in path.split("."):
            if isinstance(value, dict):
                value = value.get(part)
            elif isinstance(value, list) and part.isdigit() and int(part) < len(value):
                value = value[int(part)]
            else:
                value = None
        found[path] = value
    return found


def check_fields(paths: Sequence[str], known: Sequence[str]) -> None:
    """Raise ConfigError for a path whose first name no message here has."""
    for path in paths:
        if path.split(".")[0] not in known:
            raise ConfigError(
                f"--fields: no message here has a field {path.split('.')[0]!r}; fields: {', '.join(known)}"
            )


async def rates(broker: Broker, filters: Sequence[str], *, period_s: float = WINDOW_S) -> AsyncIterator[Rates]:
    """Messages and bytes a second, by topic, once every `period_s`. Reads headers only."""
    position = (await broker.log_status()).last_sequence
    counts: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    wanted = tuple(filters)
    async with broker.read(apart(wanted), after_sequence=position, headers_only=True) as records:
        started = anyio.current_time()
        while True:
            with anyio.move_on_after(max(0.0, started + period_s - anyio.current_time())) as waiting:
                record = await anext(records)
                if any_matches(wanted, record.subject):
                    _count(record, counts, sizes)
            if waiting.cancelled_caught or anyio.current_time() - started >= period_s:
                seconds = anyio.current_time() - started
                yield Rates(
                    seconds=seconds, messages=_per_second(counts, seconds), size_bytes=_per_second(sizes, seconds)
                )
                counts.clear()
                sizes.clear()
                started = anyio.current_time()


def _count(record: Record, counts: Counter[str], sizes: Counter[str]) -> None:
    topic = topic_and_entity(record.subject)[0]
    counts[topic] += 1
    sizes[topic] += int(record.headers.get("Nats-Msg-Size", len(record.data)))


def _per_second(counts: Mapping[str, int], seconds: float) -> dict[str, float]:
    return {topic: round(count / seconds, 1) for topic, count in sorted(counts.items())}


def follow_filters(run: str, subject: Subject) -> list[str]:
    """What must be read to follow one group, episode, session or row.

    Raises:
        ConfigError: a step has no rollout to follow.
    """
    if subject.kind is Kind.STEP:
        raise ConfigError("--follow: expected a group or an episode, found a step; tap 'step' shows steps")
    group = subject.group
    return [
        f"{PREFIX}.{run}.{pattern}"
        for pattern in (
            f"group.*.{group}",
            f"episode.*.{group}.>",
            f"trajectory.ready.{group}.>",
            "session.*.>",
            "interaction.recorded.>",
            "dead.letter.>",
        )
    ]


def is_about(subject: Subject) -> Callable[[Told], bool]:
    """A test of whether a message concerns a group or one of its slots."""
    group, slot = subject.group, subject.slot

    def test(told: Told) -> bool:
        of = told.message.subject if isinstance(told.message, DeadLetter) else told.record.subject
        tokens = of.split(".")[4:]
        if not tokens:
            return False
        parts = tokens[0].split("-")
        if parts[0] != group:
            return False
        found = parts[1] if len(parts) > 1 else (tokens[1] if len(tokens) > 1 else "")
        return slot is None or not found or found == str(slot)

    return test
