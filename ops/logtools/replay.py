"""`headrace replay FILE`: publish a recording into a broker again, in its order, at the pace that is asked for.

    records ──▶ payloads they name, stored first ──▶ published in order, many in flight ──▶ sequences checked

A replay into a fresh broker gives the same log; into one that holds part of it, the rest. It must not know stages.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

import anyio
import msgspec

from broker.api import Broker, Record
from broker.errors import BrokerError, PayloadMissingError
from broker.recording import Recording
from broker.recording.blocks import topic_and_entity
from broker.recording.references import NamedPayload, decoded_topic, may_name_payloads, named_in, named_in_payload
from ops.logtools.replay_line import Line
from schemas.errors import DecodeError, DigestError

_IN_FLIGHT: Final = 512
_PAYLOADS_AT_ONCE: Final = 16
_STEP_TOPIC: Final = "step.assembled"


class ReplayOrderError(BrokerError):
    """The broker stored messages in another order than the recording holds them."""


class ReplayConflictError(BrokerError):
    """The broker holds another message under a recorded key."""


class ReplaySettings(msgspec.Struct, frozen=True, kw_only=True):
    """What is replayed, and how fast."""

    speed: float = 0.0
    """1 = the original timing, 10 = ten times as fast; 0 = as fast as possible."""
    filters: tuple[str, ...] = ()
    after_sequence: int = 0
    to_sequence: int | None = None
    from_time_s: float | None = None
    to_time_s: float | None = None
    payloads: bool = True
    """Also store the payloads that the messages name."""
    in_flight: int = _IN_FLIGHT
    """Publishes that wait for their confirmation at once."""


class ReplayFigures(msgspec.Struct, kw_only=True):
    """What a replay did so far."""

    published: int = 0
    standing: int = 0
    """Messages that the broker held already, byte for byte."""
    payloads: int = 0
    missing_payloads: int = 0
    last_recorded_sequence: int = 0
    seconds: float = 0.0
    damages: list[str] = []
    """What of the recording could not be read, so that it is not published."""
    gaps: list[tuple[int, int]] = []
    """(first missing, last missing) sequences of the recording."""


class Replay:
    """One replay of one recording."""

    def __init__(
        self,
        recording: Recording,
        broker: Broker,
        settings: ReplaySettings | None = None,
        *,
        between_steps: Callable[[int], Awaitable[None]] | None = None,
    ) -> None:
        """Args:
        between_steps: awaited after each step's manifest was handed out, with the step: for going step by step.
        """
        self.figures: Final = ReplayFigures()
        self._recording: Final = recording
        self._broker: Final = broker
        self._settings: Final = settings or ReplaySettings()
        self._between_steps = between_steps
        self._stored: Final[set[str]] = set()
        self._same_run: Final = recording.run == broker.run

    async def run(self) -> ReplayFigures:
        """Publish everything that was asked for; returns when all of it is stored.

        Raises:
            ReplayConflictError: another message stands under a key.
            ReplayOrderError: the order could not be kept; replay into a fresh broker again.
        """
        settings = self._settings
        records = self._recording.records(
            settings.filters,
            after_sequence=settings.after_sequence,
            to_sequence=settings.to_sequence,
            from_time_s=settings.from_time_s,
            to_time_s=settings.to_time_s,
        )
        line = Line(
            records,
            needs_preparation=self._names_payloads,
            prepare=self._store_payloads,
            pause=self._pause,
            due_s=self._due_s if settings.speed > 0 else None,
        )
        started = time.monotonic()
        try:
            async with anyio.create_task_group() as tasks:
                for _ in range(settings.in_flight):
                    tasks.start_soon(self._publish_all, line)
        except BaseExceptionGroup as group:
            failed = group.subgroup(BrokerError)
            if failed is None:
                raise
            raise _first(failed) from group
        self.figures.seconds = time.monotonic() - started
        return self.figures

    def _due_s(self, record: Record, first: Record) -> float:
        """When a record is due, in seconds after the first."""
        return (record.unix_time_s - first.unix_time_s) / self._settings.speed

    async def _pause(self, record: Record) -> None:
        topic, entity = topic_and_entity(record.subject)
        if self._between_steps is not None and topic == _STEP_TOPIC and entity.isdigit():
            await self._between_steps(int(entity))

    async def _publish_all(self, line: Line) -> None:
        run, same = self._broker.run, self._same_run
        while True:
            place = await line.next()
            if place is None:
                return
            # From here to the first wait inside `publish` nothing else runs, so publishes are sent in this order.
            record = place.record
            subject = record.subject if same else _renamed(record.subject, run)
            done = await self._broker.publish(subject, record.data, headers=record.headers or None)
            if done.standing is not None:
                raise ReplayConflictError(
                    f"{subject} stands at sequence {done.sequence} with other bytes than the recording's sequence "
                    f"{record.sequence}: replay into a fresh broker, or under another run id"
                )
            if not line.settle(place, done.sequence):
                raise ReplayOrderError(
                    f"{subject} was stored out of order at sequence {done.sequence} (the connection was lost on the "
                    "way): replay into a fresh broker again"
                )
            self.figures.published += done.created
            self.figures.standing += not done.created
            self.figures.last_recorded_sequence = max(self.figures.last_recorded_sequence, record.sequence)

    def _names_payloads(self, record: Record) -> bool:
        return self._settings.payloads and may_name_payloads(record.data)

    async def _store_payloads(self, record: Record) -> None:
        topic = decoded_topic(record.subject)
        if topic is None:
            return
        try:
            wanted = list(named_in(topic, topic.decode(record.data)))
        except DecodeError:
            return
        while wanted:
            fresh = {named.ref.id: named for named in wanted if named.ref.id not in self._stored}
            self._stored.update(fresh)
            wanted = await self._store(list(fresh.values()))

    async def _store(self, wanted: Sequence[NamedPayload]) -> list[NamedPayload]:
        inner: list[NamedPayload] = []
        limit = anyio.CapacityLimiter(_PAYLOADS_AT_ONCE)

        async def store(named: NamedPayload) -> None:
            async with limit:
                try:
                    data = self._recording.payload(named.ref)
                except (PayloadMissingError, DigestError):
                    self.figures.missing_payloads += 1
                    return
                await self._broker.payloads.put(data)
            self.figures.payloads += 1
            inner.extend(named_in_payload(named.path, data))

        async with anyio.create_task_group() as tasks:
            for named in wanted:
                tasks.start_soon(store, named)
        return inner


def _renamed(subject: str, run: str) -> str:
    prefix, _, rest = subject.split(".", 2)
    return f"{prefix}.{run}.{rest}"


def _first(group: BaseExceptionGroup[BrokerError]) -> BrokerError:
    found: BrokerError | BaseExceptionGroup[BrokerError] = group
    while isinstance(found, BaseExceptionGroup):
        found = found.exceptions[0]
    return found
