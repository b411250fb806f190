"""Follows the log for whoever purges it: what is still needed, which payloads are named, what the run's account is."""

from __future__ import annotations

from typing import Final

import anyio
import msgspec
import structlog

from broker.api import Broker, RecordBatch
from broker.errors import PayloadMissingError
from broker.recording.references import (
    TOPICS_WITH_PAYLOADS,
    NamedPayload,
    decoded_topic,
    may_name_payloads,
    named_in,
    named_in_payload,
)
from ops.retention.ledger import Ledger
from pipeline.retention import LogNeeds, PayloadUses
from pipeline.room import GroupSizes
from schemas.errors import DecodeError, DigestError
from schemas.messages.sampling import GroupIssued
from schemas.messages.training import WeightsPublished
from schemas.subjects import PREFIX, Topic
from schemas.topics import (
    DEAD_LETTER,
    EPISODE_ENDED,
    EPISODE_LAUNCHED,
    EPISODE_REQUESTED,
    GROUP_CLOSED,
    GROUP_ISSUED,
    RUN_STARTED,
    STEP_ASSEMBLED,
    STEP_TRAINED,
    STREAM_LISTED,
    TRAJECTORY_READY,
    WEIGHTS_PUBLISHED,
)

log = structlog.get_logger("headrace.retention")

_PIECES: Final = "weights.published.parts"
_LOOKED_INTO: Final = frozenset(
    topic.name
    for topic in (
        DEAD_LETTER,
        EPISODE_ENDED,
        EPISODE_LAUNCHED,
        EPISODE_REQUESTED,
        GROUP_CLOSED,
        GROUP_ISSUED,
        RUN_STARTED,
        STEP_ASSEMBLED,
        STEP_TRAINED,
        STREAM_LISTED,
        TRAJECTORY_READY,
        WEIGHTS_PUBLISHED,
    )
)


class LogFollower:
    """Reads the whole log as it grows."""

    def __init__(self, broker: Broker, ledger: Ledger, *, trains: bool) -> None:
        self.needs: Final = LogNeeds(trains=trains)
        self.uses: Final = PayloadUses()
        self.sizes: Final = GroupSizes(trains=trains)
        self.ledger: Final = ledger
        self.caught_up: Final = anyio.Event()
        self._broker: Final = broker

    async def run(self) -> None:
        """For ever."""
        end = (await self._broker.log_status()).last_sequence
        if not end:
            self.caught_up.set()
        async with self._broker.read_batches([f"{PREFIX}.{self._broker.run}.>"]) as batches:
            async for batch in batches:
                await self._take(batch)
                if self.needs.sequence >= end:
                    self.caught_up.set()

    async def _take(self, batch: RecordBatch) -> None:
        for number, subject in enumerate(batch.subjects):
            sequence, data = int(batch.sequences[number]), batch.datas[number]
            topic = decoded_topic(subject)
            message: msgspec.Struct | None = None
            names = topic is not None and topic.name in TOPICS_WITH_PAYLOADS and may_name_payloads(data)
            if topic is not None and (names or topic.name in _LOOKED_INTO):
                message = _decoded(topic, data)
            named: list[NamedPayload] = []
            if topic is not None and message is not None:
                if names:
                    named = await self._note_payloads(sequence, topic, message)
                self.ledger.take(message, sequence)
            self._size(subject, data, message, named)
            self.needs.take(sequence, message)
            self.uses.passed(sequence, float(batch.unix_times_s[number]))

    def _size(self, subject: str, data: bytes, message: msgspec.Struct | None, named: list[NamedPayload]) -> None:
        tokens = subject.split(".", 5)
        key = tokens[4] if len(tokens) > 4 else ""
        if isinstance(message, GroupIssued):
            self.sizes.take(message)
        # Of what belongs to no group only the next weights must find room beside what there is.
        own = named if isinstance(message, WeightsPublished) or self.sizes.is_open(key) else []
        self.sizes.add(key, len(subject) + len(data), own)
        if message is not None and not isinstance(message, GroupIssued):
            self.sizes.take(message)

    async def _note_payloads(
        self, sequence: int, topic: Topic[msgspec.Struct], message: msgspec.Struct
    ) -> list[NamedPayload]:
        found = list(named_in(topic, message))
        for named in list(found):
            found += await self._inner(named)
        self.uses.take(sequence, topic.name, found)
        return found

    async def _inner(self, named: NamedPayload) -> list[NamedPayload]:
        """What the payload of a manifest, of a stream's rows or of a version's pieces names in turn."""
        if named.path not in ("step.assembled.manifest", "stream.listed.rows", _PIECES):
            return []
        try:
            return named_in_payload(named.path, await self._broker.payloads.get(named.ref))
        except PayloadMissingError as error:
            if named.path != _PIECES:  # old versions are taken out of the store by weight broadcast
                log.warning("a payload can't be looked into", payload=named.ref.id, path=named.path, error=str(error))
            return []
        except (DigestError, msgspec.MsgspecError) as error:
            log.warning("a payload can't be looked into", payload=named.ref.id, path=named.path, error=str(error))
            return []


def _decoded(topic: Topic[msgspec.Struct], data: bytes) -> msgspec.Struct | None:
    try:
        return topic.decode(data)
    except DecodeError:
        return None  # whoever consumes it makes it a dead letter
