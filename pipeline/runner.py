"""Runs a bound stage: decode → handle → publish confirmed → acknowledge.

One reader hands deliveries to a fixed number of handlers; one heartbeat keeps long work from being delivered to others.

    broker ──▶ reader ──(bounded)──▶ handlers ──▶ publish ──▶ ack
                                        └── keeper: still_working for what takes long

A worker that dies at any instruction loses nothing: what it did not acknowledge comes again, and outputs that already
stand are adopted by their key.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any, Final, TypeVar

import anyio
import msgspec
import structlog
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from broker.api import Broker, ConsumerSettings, Delivery
from broker.errors import BrokerError
from pipeline.delivery import Ack, GiveUp, Retry, Stop, decide, decide_before
from pipeline.errors import ContractError
from pipeline.metrics import Metrics
from pipeline.publishing import publish_patiently
from pipeline.retries import original, retries_of
from pipeline.stage import BoundStage, Outputs
from pipeline.tracing import begin_work
from schemas.errors import DecodeError
from schemas.messages.sampling import DeadLetter
from schemas.topics import DEAD_LETTER

M = TypeVar("M", bound=msgspec.Struct)
log = structlog.get_logger("headrace.runner")

_ERROR_TEXT_LIMIT: Final = 2000


class RunnerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How a stage is run."""

    consumer: ConsumerSettings = ConsumerSettings()
    drain_deadline_s: float = 8.0
    """How long handlers may finish what they hold after a drain began."""


class _Given(msgspec.Struct, frozen=True, kw_only=True):
    """A delivery and the message that it stands for: a retry of a dead letter stands for the letter's message."""

    delivery: Delivery
    subject: str
    data: bytes


class StageRunner:
    """One worker of one stage."""

    def __init__(
        self, stage: BoundStage[Any], broker: Broker, metrics: Metrics, settings: RunnerSettings | None = None
    ) -> None:
        self.stage: Final = stage
        self.broker: Final = broker
        self.metrics: Final = metrics
        self.settings: Final = settings or RunnerSettings()
        self._held: Final[dict[int, tuple[Delivery, float]]] = {}
        self._draining: Final = anyio.Event()

    def drain(self) -> None:
        """Take no further message; finish what is held."""
        self._draining.set()

    async def run(self) -> None:
        """Until drained, or until a contract is broken.

        Raises:
            ContractError: the stage must not go on.
        """
        stage, settings = self.stage, self.settings
        filters = [stage.consumes.filter(self.broker.run), retries_of(self.broker.run, stage.name)]
        send, receive = anyio.create_memory_object_stream[Delivery](max_buffer_size=stage.concurrency)
        async with (
            self.broker.consume(stage.name, filters, settings.consumer) as deliveries,
            anyio.create_task_group() as keeper,
        ):
            keeper.start_soon(self._keep)
            async with anyio.create_task_group() as handlers, receive:
                for _ in range(stage.concurrency):
                    handlers.start_soon(self._handle_all, receive.clone())
                await self._read(deliveries, send)
                handlers.cancel_scope.deadline = anyio.current_time() + settings.drain_deadline_s
            keeper.cancel_scope.cancel()

    async def _read(self, deliveries: AsyncIterator[Delivery], send: MemoryObjectSendStream[Delivery]) -> None:
        """Hand deliveries on until a drain begins."""
        async with send, anyio.create_task_group() as tasks:

            async def stop_when_draining() -> None:
                await self._draining.wait()
                tasks.cancel_scope.cancel()

            tasks.start_soon(stop_when_draining)
            self.metrics.wait_for(f"messages on {self.stage.consumes.name}")
            async for delivery in deliveries:
                self._held[delivery.sequence] = (delivery, anyio.current_time())
                self.metrics.received += 1
                try:
                    send.send_nowait(delivery)
                except anyio.WouldBlock:
                    await send.send(delivery)
            tasks.cancel_scope.cancel()

    async def _keep(self) -> None:
        """Tell the broker about work that takes longer than a third of its patience."""
        period_s = self.settings.consumer.ack_wait_s / 3
        while True:
            await anyio.sleep(period_s)
            due = anyio.current_time() - period_s / 2
            for delivery, since in list(self._held.values()):
                if since <= due:
                    try:
                        await delivery.still_working()
                    except BrokerError as error:
                        log.warning("could not report work in progress", stage=self.stage.name, error=str(error))

    async def _handle_all(self, receive: MemoryObjectReceiveStream[Delivery]) -> None:
        metrics = self.metrics
        async with receive:
            async for delivery in receive:
                metrics.in_flight += 1
                metrics.work()
                started = time.perf_counter()
                try:
                    await self._handle(delivery)
                finally:
                    metrics.busy_s += time.perf_counter() - started
                    metrics.in_flight -= 1
                    self._held.pop(delivery.sequence, None)
                    if not metrics.in_flight:
                        metrics.wait_for(f"messages on {self.stage.consumes.name}")

    async def _handle(self, delivery: Delivery) -> None:
        stage = self.stage
        begin_work()
        too_often = decide_before(delivery.num_delivered, stage.policy)
        given = _Given(delivery=delivery, subject=delivery.subject, data=delivery.data)
        try:
            subject, data = original(self.broker.run, delivery.subject, delivery.data)
            given = _Given(delivery=delivery, subject=subject, data=data)
            if too_often is not None:
                await self._give_up(given, too_often.reason, "its workers died or never answered")
                return
            place = subject if subject == delivery.subject else None
            message = stage.consumes.decode_at(self.broker.run, place, data)
        except DecodeError as error:
            await self._give_up(given, "undecodable", str(error))
            return
        error: Exception | None = None
        try:
            await self._publish(await stage.handle(message))
        except Exception as stage_error:  # noqa: BLE001 - the one place where a stage's failure becomes a decision
            error = stage_error
        await self._settle(given, message, error)

    async def _publish(self, outputs: Outputs) -> None:
        if len(outputs) == 1:
            await self._publish_one(outputs[0])
        elif outputs:
            async with anyio.create_task_group() as tasks:
                for output in outputs:
                    tasks.start_soon(self._publish_one, output)

    async def _publish_one(self, output: msgspec.Struct) -> None:
        topic = self.stage.topics.get(type(output))
        if topic is None:
            allowed = ", ".join(sorted(kind.__name__ for kind in self.stage.topics)) or "nothing"
            raise ContractError(
                f"stage {self.stage.name} returned a {type(output).__name__}; it declares to produce {allowed}"
            )
        published = await publish_patiently(
            self.broker, topic.subject(self.broker.run, output), topic.encode(output), self.metrics
        )
        if published.created:
            self.metrics.published += 1
        else:
            self.metrics.adopted += 1

    async def _settle(self, given: _Given, message: msgspec.Struct, error: Exception | None) -> None:
        delivery = given.delivery
        match decide(error, delivery.num_delivered, self.stage.policy):
            case Ack():
                self.metrics.succeeded += 1
                await delivery.ack()
            case Retry(delay_s=delay_s):
                self.metrics.retried += 1
                log.warning(
                    "a message is tried again",
                    stage=self.stage.name,
                    subject=given.subject,
                    attempt=delivery.num_delivered,
                    delay_s=round(delay_s, 3),
                    error=describe(error),
                )
                await delivery.retry(delay_s)
            case GiveUp(reason=reason):
                if self.stage.gave_up is not None:
                    await self._publish(self.stage.gave_up(message, describe(error)))
                await self._give_up(given, reason, describe(error))
            case Stop(reason=reason):
                raise ContractError(f"stage {self.stage.name} stops at {given.subject}: {reason}") from error

    async def _give_up(self, given: _Given, reason: str, error: str) -> None:
        delivery = given.delivery
        letter = DeadLetter(
            stage=self.stage.name,
            sequence=delivery.sequence,
            subject=given.subject,
            reason=reason,
            error=error[:_ERROR_TEXT_LIMIT],
            attempts=delivery.num_delivered,
            data=bytes(given.data),
        )
        await publish_patiently(
            self.broker, DEAD_LETTER.subject(self.broker.run, letter), DEAD_LETTER.encode(letter), self.metrics
        )
        await delivery.ack()
        self.metrics.dead += 1
        log.error(
            "a message went to the dead letters",
            stage=self.stage.name,
            subject=given.subject,
            reason=reason,
            error=letter.error,
        )


def describe(error: BaseException | None) -> str:
    """Type and text of an error in one line, groups unfolded."""
    if error is None:
        return ""
    if isinstance(error, BaseExceptionGroup):
        return "; ".join(describe(member) for member in error.exceptions)
    return f"{type(error).__name__}: {error}"[:_ERROR_TEXT_LIMIT]
