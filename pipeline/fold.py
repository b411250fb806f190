"""Folds: stateful stages whose state is a function of the ordered log.

    checkpoint ──▶ state ──▶ for each message in order: step(state, message) ──▶ outputs, created once by key
                                          └── now and then: state as a payload, named on a last-value key

A fold never acknowledges anything: after a crash it starts from its checkpoint and folds the rest again; outputs that
stand already are suppressed by their key, and one that differs from what stands stops it. Time comes as messages.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Final, Generic, Protocol, TypeVar

import anyio
import msgspec
import structlog

from broker.api import Broker, Record
from broker.errors import ConflictError, PayloadMissingError
from broker.naming import inline_payload
from pipeline.errors import ContractError, FoldDivergedError, RefusedError
from pipeline.metrics import Metrics
from pipeline.publishing import publish_patiently
from pipeline.retries import original, retries_of
from pipeline.stage import AnyTopic
from schemas.errors import DecodeError, DigestError
from schemas.messages.sampling import DeadLetter
from schemas.messages.training import FoldCheckpoint
from schemas.payload import PayloadRef
from schemas.topics import DEAD_LETTER

S = TypeVar("S", bound=msgspec.Struct)
log = structlog.get_logger("headrace.fold")
PAYLOAD_PERIOD_S: Final = 0.25


class Output(msgspec.Struct, frozen=True, kw_only=True):
    """A message that a fold says, with the payloads that must be stored before it."""

    message: msgspec.Struct
    payloads: Sequence[bytes] = ()
    """Each is named in the message by `schemas.payload.run_ref`."""


class Fold(Protocol[S]):
    """A pure fold. `step` may change the state in place; it must not look at a clock, a file, a random source or
    anything else but its arguments. RefusedError makes a message a dead letter, before anything of the state was changed.
    """

    @property
    def name(self) -> str: ...
    @property
    def consumes(self) -> tuple[AnyTopic, ...]: ...
    @property
    def produces(self) -> tuple[AnyTopic, ...]: ...
    @property
    def state_type(self) -> type[S]: ...

    def initial(self) -> S: ...

    def step(self, state: S, message: msgspec.Struct) -> list[Output]: ...

    def wants(self, message: msgspec.Struct) -> PayloadRef | None:
        """A payload that must be loaded (see `load`) before this message can be folded."""
        ...

    def wanted_by(self, state: S) -> Sequence[PayloadRef]:
        """The payloads that a restored state needs."""
        ...

    def load(self, ref: PayloadRef, data: memoryview) -> None:
        """Take the content of a wanted payload. Not part of the state; loading twice is harmless."""
        ...

    def describe(self, state: S) -> tuple[str, Mapping[str, float]]:
        """What it waits for, in words, and figures for status."""
        ...


class FoldSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How a fold is run."""

    checkpoint_every: int = 2000
    """Messages between checkpoints."""
    checkpoint_period_s: float = 15.0
    """Seconds between checkpoints, when there was anything new."""
    payload_deadline_s: float = 10.0
    """How long a payload that a message names is looked for (a shared folder may show it late) before the message is refused."""


class FoldRunner(Generic[S]):
    """One worker of one fold. A second one is harmless: it computes the same, and everything stands already."""

    def __init__(
        self,
        fold: Fold[S],
        broker: Broker,
        metrics: Metrics,
        settings: FoldSettings | None = None,
        *,
        on_message: Callable[[int, msgspec.Struct], None] | None = None,
    ) -> None:
        self.fold: Final = fold
        self.broker: Final = broker
        self.metrics: Final = metrics
        self.settings: Final = settings or FoldSettings()
        self.state: S = fold.initial()
        self.sequence = 0
        """Everything up to here is folded."""
        self._by_name: Final = {topic.name: topic for topic in fold.consumes}
        self._topics: Final[dict[type[msgspec.Struct], AnyTopic]] = {topic.message: topic for topic in fold.produces}
        self._decoder: Final = msgspec.msgpack.Decoder(fold.state_type)
        self._encoder: Final = msgspec.msgpack.Encoder()
        self._on_message = on_message
        self._revision: int | None = 0
        self._checkpoint: FoldCheckpoint | None = None
        self._stopping: Final = anyio.Event()
        # A checkpoint is taken between two messages, never while one message's outputs are on their way.
        self._between: Final = anyio.Lock(fast_acquire=True)

    def drain(self) -> None:
        """Checkpoint and end."""
        self._stopping.set()

    async def restore(self) -> None:
        """Take up the latest checkpoint, if there is one.

        Raises:
            ContractError: the checkpoint can't be read by this version.
        """
        found = await self.broker.load_state(self._key)
        if found is None:
            return
        data, self._revision = found
        checkpoint = msgspec.msgpack.decode(data, type=FoldCheckpoint)
        raw = await self.broker.payloads.get(checkpoint.state)
        try:
            self.state = self._decoder.decode(raw)
        except msgspec.MsgspecError as error:
            raise ContractError(
                f"fold {self.fold.name}: its checkpoint at sequence {checkpoint.sequence} can't be read by this version "
                f"({error}); delete the state key '{self._key}' to fold the log from its start"
            ) from error
        self.sequence = checkpoint.sequence
        self._checkpoint = checkpoint
        for ref in self.fold.wanted_by(self.state):
            self.fold.load(ref, await self._payload(ref))
        log.info("fold restored", fold=self.fold.name, sequence=self.sequence)

    async def run(self, *, beside: Callable[[], Coroutine[Any, Any, None]] | None = None) -> None:
        """Fold the log as it grows, until drained.

        Args:
            beside: runs as long as the fold does, from when it is restored (a ticker).

        Raises:
            ContractError: a promise is broken; nothing was guessed.
        """
        await self.restore()
        filters = [topic.filter(self.broker.run) for topic in self.fold.consumes]
        filters.append(retries_of(self.broker.run, self.fold.name))
        async with anyio.create_task_group() as tasks:

            async def stop() -> None:
                await self._stopping.wait()
                tasks.cancel_scope.cancel()

            tasks.start_soon(stop)
            tasks.start_soon(self._checkpoint_now_and_then)
            if beside is not None:
                tasks.start_soon(beside)
            self._describe()
            async with self.broker.read(filters, after_sequence=self.sequence) as records:
                async for record in records:
                    with anyio.CancelScope(shield=True):
                        await self.fold_record(record)
        with anyio.CancelScope(shield=True), anyio.move_on_after(5.0):
            await self.save()

    async def fold_record(self, record: Record) -> None:
        """Fold one record and publish what follows from it."""
        async with self._between:
            await self._fold_record(record)

    async def _fold_record(self, record: Record) -> None:
        subject, data = record.subject, record.data
        try:
            subject, data = original(self.broker.run, subject, data)
            place = subject if subject == record.subject else None
            message = self._topic(subject).decode_at(self.broker.run, place, data)
            wanted = self.fold.wants(message)
            if wanted is not None:
                if await self._is_dead(record.sequence):  # though its payload was stored since
                    self.sequence = record.sequence
                    return
                self._load(wanted, await self._look_for(wanted))
            outputs = self.fold.step(self.state, message)
        except (DecodeError, RefusedError) as error:
            await self._dead_letter(record.sequence, subject, data, error)
            self.sequence = record.sequence
            return
        self.metrics.received += 1
        for output in outputs:
            await self._publish(output)
        self.sequence = record.sequence
        self.metrics.succeeded += 1
        if self._on_message is not None:
            self._on_message(record.sequence, message)
        self._describe()

    def _topic(self, subject: str) -> AnyTopic:
        name = ".".join(subject.split(".", 4)[2:4])
        topic = self._by_name.get(name)
        if topic is None:
            raise DecodeError(f"fold {self.fold.name} takes no message of '{name}', found a retry of '{subject[:200]}'")
        return topic

    def _load(self, ref: PayloadRef, data: memoryview) -> None:
        """Give the fold a payload: what it holds is part of the message that names it."""
        try:
            self.fold.load(ref, data)
        except msgspec.MsgspecError as error:
            raise DecodeError(f"payload {ref.id} ({ref.size_bytes} bytes) can't be read: {error}") from error

    async def save(self) -> None:
        """Write a checkpoint, unless nothing is new. Another worker's newer one is respected."""
        former = self._checkpoint
        if self._since_checkpoint() <= 0:
            return
        async with self._between:
            sequence, state = self.sequence, self._encoder.encode(self.state)
        ref = await self.broker.payloads.put(state)
        checkpoint = FoldCheckpoint(fold=self.fold.name, sequence=sequence, state=ref)
        try:
            self._revision = await self.broker.save_state(
                self._key, msgspec.msgpack.encode(checkpoint), expected_revision=self._revision
            )
        except ConflictError:
            found = await self.broker.load_state(self._key)
            if found is None:
                self._revision = 0
                return
            self._checkpoint = msgspec.msgpack.decode(found[0], type=FoldCheckpoint)
            self._revision = found[1]
            return
        self._checkpoint = checkpoint
        if former is not None and former.state.id != ref.id:
            await self.broker.payloads.delete(former.state.id)

    @property
    def _key(self) -> str:
        return f"fold.{self.fold.name}"

    def _describe(self) -> None:
        waits_for, gauges = self.fold.describe(self.state)
        self.metrics.wait_for(waits_for)
        self.metrics.gauges.update(gauges, folded_sequence=self.sequence)

    async def _payload(self, ref: PayloadRef) -> memoryview:
        """The bytes of a wanted payload.

        Raises:
            DecodeError: they ride inside the message and are damaged, or are said to lie where no run has a store.
            PayloadMissingError: the run's store lacks them.
            DigestError: it holds other bytes.
        """
        try:
            inside = inline_payload(ref)
        except (PayloadMissingError, DigestError) as error:
            raise DecodeError(str(error)) from error
        return await self.broker.payloads.get(ref) if inside is None else inside

    async def _look_for(self, ref: PayloadRef) -> memoryview:
        """The bytes of a payload that was stored before the message that names it, so they are there or will never be.

        Raises:
            DecodeError, DigestError: as `_payload`.
            RefusedError: the run's store lacks them.
        """
        until_s = anyio.current_time() + self.settings.payload_deadline_s
        while True:
            try:
                return await self._payload(ref)
            except PayloadMissingError as error:
                if anyio.current_time() >= until_s:
                    raise RefusedError(f"{error}; store it and retry the message") from error
            self.metrics.wait_for(f"payload {ref.id} of {ref.size_bytes} bytes, which the store lacks")
            await anyio.sleep(PAYLOAD_PERIOD_S)

    async def _is_dead(self, sequence: int) -> bool:
        """Whether this fold, in an earlier life, made the message at `sequence` a dead letter: then it stays one."""
        return await self.broker.get(DEAD_LETTER.subject_of(self.broker.run, self.fold.name, sequence)) is not None

    async def _publish(self, output: Output) -> None:
        topic = self._topics.get(type(output.message))
        if topic is None:
            raise ContractError(
                f"fold {self.fold.name} returned a {type(output.message).__name__}, which it does not declare"
            )
        for payload in output.payloads:
            await self.broker.payloads.put(payload)
        subject = topic.subject(self.broker.run, output.message)
        published = await publish_patiently(self.broker, subject, topic.encode(output.message), self.metrics)
        if published.standing is not None:
            raise FoldDivergedError(
                f"fold {self.fold.name}: {subject} stands at sequence {published.sequence} with other bytes than this "
                "version computes from the same log; was the config or the code changed in the middle of a run? "
                "Start a new run, or return to the version that began this one"
            )
        if published.created:
            self.metrics.published += 1
        else:
            self.metrics.adopted += 1

    async def _dead_letter(
        self, sequence: int, of_subject: str, data: bytes, error: DecodeError | RefusedError
    ) -> None:
        letter = DeadLetter(
            stage=self.fold.name,
            sequence=sequence,
            subject=of_subject,
            reason="undecodable" if isinstance(error, DecodeError) else "refused",
            error=str(error),
            attempts=1,
            data=data,
        )
        subject = DEAD_LETTER.subject(self.broker.run, letter)
        await publish_patiently(self.broker, subject, DEAD_LETTER.encode(letter), self.metrics)
        self.metrics.dead += 1
        log.error("a fold skipped a message", fold=self.fold.name, subject=of_subject, error=str(error))

    async def _checkpoint_now_and_then(self) -> None:
        while True:
            with anyio.move_on_after(self.settings.checkpoint_period_s):
                while self._since_checkpoint() < self.settings.checkpoint_every:
                    await anyio.sleep(0.25)
            await self.save()

    def _since_checkpoint(self) -> int:
        return self.sequence - (0 if self._checkpoint is None else self._checkpoint.sequence)


def replay(fold: Fold[Any], messages: Sequence[msgspec.Struct]) -> list[Output]:
    """All outputs of a fold over these messages, from its initial state: for tests, diffs and audits."""
    state = fold.initial()
    outputs: list[Output] = []
    for message in messages:
        outputs.extend(fold.step(state, message))
    return outputs
