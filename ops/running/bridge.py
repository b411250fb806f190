"""Carries one run's groups and trajectories into the log of another, which assembles and trains from them.

    first run's log ──group.issued, trajectory.ready, fold.tick──▶ payloads copied ──▶ second run's log, in the same order
                                                                     (as far ahead of its trainer as MAX_LEAD_STEPS)

Nothing is written to the first run. A copied message has the same key and the same bytes, so a copy that is made again
changes nothing, and the position is only where to go on. Time comes with the ticks of the first run: deadlines fall where
they fell. When the first run is over, so is the second, as soon as it trained what there is.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Final

import anyio
import anyio.streams.memory
import msgspec
import structlog

from broker.api import Broker
from broker.errors import BrokerError, PayloadMissingError, RetryableBrokerError
from ops.running.progress import Progress
from ops.running.source import SourceEnd, SourceRun, SourceRunError, open_source, read_end
from pipeline.errors import PipelineError
from pipeline.log import Entry, RunLog
from pipeline.metrics import REPORT_PERIOD_S, Metrics, report_subject
from pipeline.publishing import publish_patiently
from schemas.errors import SchemaError
from schemas.messages.rollout import Trajectory
from schemas.messages.sampling import GroupIssued, Tick
from schemas.payload import RUN_STORE, PayloadRef
from schemas.topics import FOLD_TICK, GROUP_ISSUED, RUN_STARTED, STEP_ASSEMBLED, STEP_TRAINED, TRAJECTORY_READY

log = structlog.get_logger("headrace.bridge")

MAX_LEAD_STEPS: Final = 8
"""Assembled steps that may wait for the trainer: beyond, the first run's log is the better place to wait in."""
_AHEAD: Final = 64
"""Messages whose payloads are copied while earlier ones are published."""
_COPIES_AT_ONCE: Final = 16
_SAVE_EVERY: Final = 500
_LOOK_PERIOD_S: Final = 1.0
_STATE_KEY: Final = "bridge"


class BridgePosition(msgspec.Struct, frozen=True, kw_only=True):
    """Last-value of the second run: where its bridge goes on."""

    source_run: str
    sequence: int = 0
    """Of the first run: everything up to here is copied."""
    published: int = 0
    """Of the second run: the last copied message."""


class _Copy(msgspec.Struct, frozen=True, kw_only=True):
    """A message under way."""

    entry: Entry
    payloads_are_there: anyio.Event


class _SourceAwayError(Exception):
    """The first run's broker no longer answers."""


class Bridge:
    """See the module."""

    def __init__(self, source: SourceRun, broker: Broker, progress: Progress) -> None:
        self.failure: Exception | None = None
        """Why it ended before its time."""
        self.ended: Final = anyio.Event()
        """All is copied and trained, or it failed."""
        self.metrics: Final = Metrics(broker.run, "bridge")
        self._source: Final = source
        self._broker: Final = broker
        self._progress: Final = progress
        self._limiter: Final = anyio.CapacityLimiter(_COPIES_AT_ONCE)
        self._position = BridgePosition(source_run=source.run)
        self._saved = 0

    async def run(self) -> None:
        """Copy until the first run is over and all of it is trained. Sets `ended`; what went wrong is in `failure`."""
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._announce)
                await self._restore()
                while not await self._follow_once():
                    log.warning("the first run's broker is away: its log is opened anew", run=self._position.source_run)
                await self._until_trained()
                tasks.cancel_scope.cancel()
        except* (BrokerError, PipelineError, SchemaError, SourceRunError) as group:
            self.failure = _first(group)
        self.ended.set()

    async def _restore(self) -> None:
        found = await self._broker.load_state(_STATE_KEY)
        if found is None:
            return
        position = msgspec.msgpack.decode(found[0], type=BridgePosition)
        if position.source_run != self._position.source_run:
            raise SourceRunError(
                f"run {self._broker.run!r} was begun from run {position.source_run!r}: expected the same again, found "
                f"{self._position.source_run!r}; take another run.id and run.dir for that"
            )
        self._position = position
        self._saved = position.sequence

    async def _follow_once(self) -> bool:
        """Copy while the first run's log can be read; whether its end is reached."""
        self.metrics.wait_for(f"the log of run {self._position.source_run}")
        away = False
        over = False
        try:
            async with open_source(self._source) as (source, is_over):
                status = await source.log_status()
                if status.first_sequence > self._position.sequence + 1 and status.num_messages:
                    raise SourceRunError(
                        f"run {self._position.source_run!r}: its log begins at sequence {status.first_sequence}, expected "
                        f"{self._position.sequence + 1}: what lies between was purged and can't be assembled any more"
                    )
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(_watch, source)
                    end = await read_end(source)
                    if not (is_over or end.reached):
                        await self._copy(source, end, follow=True)
                    await self._copy(source, end, follow=False)  # what came after its last step
                    over = True
                    tasks.cancel_scope.cancel()
        except* (RetryableBrokerError, _SourceAwayError):
            away = not over
        return not away

    async def _copy(self, source: Broker, end: SourceEnd, *, follow: bool) -> None:
        topics = [GROUP_ISSUED, TRAJECTORY_READY, FOLD_TICK, RUN_STARTED, STEP_TRAINED]
        send, receive = anyio.create_memory_object_stream[_Copy](_AHEAD)
        reader = RunLog(source).read(topics, after_sequence=self._position.sequence, follow=follow)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._publish_in_order, receive)
            async with send, reader as entries:
                async for entry in entries:
                    self.metrics.received += 1
                    end = end.after(entry.message)
                    if _is_wanted(entry.message):
                        await self._wait_for_the_trainer()
                        copy = _Copy(entry=entry, payloads_are_there=anyio.Event())
                        tasks.start_soon(self._copy_payloads, source, copy)
                        await send.send(copy)
                    if follow and end.reached:
                        break
        await self._save()

    async def _wait_for_the_trainer(self) -> None:
        progress = self._progress
        while progress.assembled_step - progress.step >= MAX_LEAD_STEPS:
            self.metrics.wait_for(f"step.trained.{progress.step + 1}: {MAX_LEAD_STEPS} assembled steps wait")
            await anyio.sleep(0.1)
        self.metrics.wait_for(f"messages of run {self._position.source_run}")

    async def _copy_payloads(self, source: Broker, copy: _Copy) -> None:
        for ref in _refs(copy.entry.message):
            async with self._limiter:
                try:
                    data = await source.payloads.get(ref)
                except PayloadMissingError as error:
                    raise SourceRunError(
                        f"run {self._position.source_run!r}: the tokens of sequence {copy.entry.sequence} are gone "
                        f"({error}): retention collected them"
                    ) from error
                await self._broker.payloads.put(data)
        copy.payloads_are_there.set()

    async def _publish_in_order(self, copies: anyio.streams.memory.MemoryObjectReceiveStream[_Copy]) -> None:
        async with copies:
            async for copy in copies:
                await copy.payloads_are_there.wait()
                topic, message = copy.entry.topic, copy.entry.message
                subject = topic.subject(self._broker.run, message)
                published = await publish_patiently(self._broker, subject, topic.encode(message), self.metrics)
                if published.standing is not None:
                    raise SourceRunError(
                        f"{subject} stands with other bytes than the first run's: this run was begun from another log"
                    )
                self.metrics.published += published.created
                self.metrics.adopted += not published.created
                self._position = msgspec.structs.replace(
                    self._position,
                    sequence=copy.entry.sequence,
                    published=max(published.sequence, self._position.published),
                )
                self.metrics.gauges["source_sequence"] = copy.entry.sequence
                if copy.entry.sequence - self._saved >= _SAVE_EVERY:
                    await self._save()

    async def _save(self) -> None:
        position = self._position
        await self._broker.save_state(_STATE_KEY, msgspec.msgpack.encode(position))
        self._saved = position.sequence

    async def _until_trained(self) -> None:
        """Assembly has folded the last message, and the trainer has trained the last step that came of it."""
        progress = self._progress
        self.metrics.wait_for("assembly, at the end of the first run's log")
        while _folded(progress) < self._position.published:
            await anyio.sleep(0.1)
        assembled = 0
        async with RunLog(self._broker).read([STEP_ASSEMBLED], follow=False) as entries:
            async for _ in entries:
                assembled += 1
        self.metrics.wait_for(f"step.trained.{assembled}, the last one")
        while progress.step < assembled:
            await anyio.sleep(0.1)
        log.info("the first run is over and all of it is trained", steps=assembled)

    async def _announce(self) -> None:
        subject = report_subject(self._broker.run, self.metrics.stage)
        while True:
            try:
                await self._broker.announce(subject, msgspec.msgpack.encode(self.metrics.report()))
            except BrokerError as error:
                log.debug("a report was not announced", error=str(error))
            await anyio.sleep(REPORT_PERIOD_S)


@asynccontextmanager
async def bridged(source: SourceRun | None, broker: Broker, progress: Progress) -> AsyncGenerator[Bridge | None]:
    """A bridge that works while the context is open; nothing without a first run."""
    if source is None:
        yield None
        return
    bridge = Bridge(source, broker, progress)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(bridge.run)
        yield bridge
        tasks.cancel_scope.cancel()


async def _watch(source: Broker) -> None:
    """Raise when the broker is gone: readers would wait for it for ever.

    Raises:
        _SourceAwayError: it does not answer.
    """
    while True:
        await anyio.sleep(_LOOK_PERIOD_S)
        try:
            await source.log_status()
        except BrokerError as error:
            raise _SourceAwayError(str(error)) from error


def _is_wanted(message: msgspec.Struct) -> bool:
    """Evaluation says something about the first run's policy, nothing about a loss."""
    match message:
        case GroupIssued() | Trajectory():
            return not message.evaluation
        case _:
            return isinstance(message, Tick)


def _refs(message: msgspec.Struct) -> list[PayloadRef]:
    """The stored payloads that a message names."""
    match message:
        case Trajectory():
            found = [row.tokens for row in message.rows]
        case GroupIssued(prompt=PayloadRef() as prompt):
            found = [prompt]
        case _:
            found = []
    return [ref for ref in found if ref.store == RUN_STORE]


def _folded(progress: Progress) -> float:
    report = progress.reports.get("assembly")
    return 0.0 if report is None else report.gauges.get("folded_sequence", 0.0)


def _first(group: BaseExceptionGroup[Exception]) -> Exception:
    error: Exception | BaseExceptionGroup[Exception] = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
