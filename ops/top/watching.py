"""Keeps a model up to date: listens to reports, follows the log, asks the broker for backlogs. Reads only."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

import anyio
import msgspec

from broker.api import Broker
from broker.errors import BrokerError
from ops.status import service_of
from ops.top.model import Backlog, Model
from pipeline.log import RunLog
from pipeline.metrics import REPORT_PREFIX, WorkerReport
from pipeline.presence import roll_call
from schemas.errors import SchemaError
from schemas.messages.engines import EngineAnnouncement, engines_pattern
from schemas.messages.training import Manifest, StepAssembled
from schemas.payload import PayloadRef
from schemas.subjects import PREFIX
from schemas.topics import (
    DEAD_DROPPED,
    DEAD_LETTER,
    DEAD_RETRY,
    GROUP_CLOSED,
    GROUP_ISSUED,
    RUN_CONTROL,
    RUN_STARTED,
    STEP_ASSEMBLED,
    STEP_TRAINED,
    TRAJECTORY_READY,
)
from stages.assembly.fold import AssemblyFold
from stages.sampling.fold import SamplingFold

_WHOLE: Final = (RUN_STARTED, RUN_CONTROL, STEP_ASSEMBLED, STEP_TRAINED, DEAD_LETTER, DEAD_RETRY, DEAD_DROPPED)
"""Few messages a step: read from the log's start."""
_RECENT: Final = (*_WHOLE, GROUP_ISSUED, TRAJECTORY_READY, GROUP_CLOSED)
_RECENT_MESSAGES: Final = 20_000
"""Groups are followed from so far before the log's end."""
_MANIFESTS: Final = 60
"""Newest steps whose rewards are told by stream at the beginning."""
_ASK_EVERY_S: Final = 1.0
_TRY_AGAIN_S: Final = 1.0
_ANSWER_S: Final = 10.0
"""A broker that has not answered for so long is told to be away."""
_COUNTED: Final = 100
_FOLDS: Final = {
    "sampling": tuple(topic.name for topic in SamplingFold.consumes),
    "assembly": tuple(topic.name for topic in AssemblyFold.consumes),
}


async def watch(broker: Broker, model: Model) -> None:
    """Keep a model up to date, for ever; while the broker is away the model says so."""
    async with anyio.create_task_group() as tasks:
        for part in (_listen, _hear_engines, _follow, _ask):
            tasks.start_soon(_again_and_again, part, broker, model)


async def _again_and_again(part: Callable[[Broker, Model], Awaitable[None]], broker: Broker, model: Model) -> None:
    while True:
        try:
            await part(broker, model)
        except BrokerError as error:
            model.problem = str(error)
        await anyio.sleep(_TRY_AGAIN_S)


async def _listen(broker: Broker, model: Model) -> None:
    async with broker.listen(f"{REPORT_PREFIX}.{broker.run}.>") as announcements:
        async for _subject, data in announcements:
            model.take_report(msgspec.msgpack.decode(data, type=WorkerReport))


async def _hear_engines(broker: Broker, model: Model) -> None:
    async with broker.listen(engines_pattern(broker.run)) as announcements:
        async for _subject, data in announcements:
            told = msgspec.msgpack.decode(data, type=EngineAnnouncement)
            model.engines[told.name] = told


async def _follow(broker: Broker, model: Model) -> None:
    log = RunLog(broker)
    boundary = max(model.position, (await broker.log_status()).last_sequence - _RECENT_MESSAGES)
    manifests: list[PayloadRef] = []
    if boundary > model.position:
        async with log.read(_WHOLE, after_sequence=model.position, follow=False) as entries:
            async for entry in entries:
                if entry.sequence > boundary:
                    break
                _take(model, manifests, entry.message, entry.sequence, entry.unix_time_s)
    async with log.read(_RECENT, after_sequence=boundary, follow=False) as entries:
        async for entry in entries:
            _take(model, manifests, entry.message, entry.sequence, entry.unix_time_s)
    for ref in manifests[-_MANIFESTS:]:
        await _tell_streams(broker, model, ref)
    async with log.read(_RECENT, after_sequence=model.position) as entries:
        async for entry in entries:
            manifests.clear()
            _take(model, manifests, entry.message, entry.sequence, entry.unix_time_s)
            for ref in manifests:
                await _tell_streams(broker, model, ref)


def _take(
    model: Model, manifests: list[PayloadRef], message: msgspec.Struct, sequence: int, unix_time_s: float
) -> None:
    model.take(message, sequence, unix_time_s)
    if isinstance(message, StepAssembled):
        manifests.append(message.manifest)


async def _tell_streams(broker: Broker, model: Model, ref: PayloadRef) -> None:
    try:
        data = ref.inline if ref.inline is not None else await broker.payloads.get(ref)
        manifest = msgspec.msgpack.decode(data, type=Manifest)
    except (BrokerError, SchemaError, msgspec.MsgspecError):
        return  # not kept any more: this step's rewards stay untold by stream
    found = {name: stats["reward_mean"] for name, stats in manifest.stream_stats.items() if "reward_mean" in stats}
    model.take_stream_rewards(found)


async def _ask(broker: Broker, model: Model) -> None:
    while True:
        try:
            with anyio.fail_after(
                _ANSWER_S
            ):  # a connection that is lost, or is not known to be, is waited for much longer
                status = await broker.log_status()
                model.backlogs = await backlogs(broker, model)
                model.roll = await roll_call(broker)
        except TimeoutError:
            model.problem = f"nothing for {_ANSWER_S:g} s"
            continue
        model.log_messages, model.log_bytes = status.num_messages, status.size_bytes
        model.problem = ""
        model.forget_silent(time.time())
        await anyio.sleep(_ASK_EVERY_S)


async def backlogs(broker: Broker, model: Model) -> dict[str, Backlog]:
    """What waits before each stage: consumers as the broker counts them, folds and the trainer by where they have read to."""
    found: dict[str, Backlog] = {}
    for consumer in await broker.consumers():
        waiting = consumer.num_pending + consumer.num_ack_pending
        oldest = await _oldest(broker, consumer.filters, consumer.ack_floor) if waiting else 0.0
        found[service_of(consumer.durable)] = Backlog(count=waiting, oldest_unix_s=oldest)
    for (stage, _), worker in list(model.workers.items()):  # one may come while the broker is asked
        gauges = worker.report.gauges
        if stage in _FOLDS and "folded_sequence" in gauges:
            filters = [f"{PREFIX}.{broker.run}.{topic}.>" for topic in _FOLDS[stage]]
            found[stage] = await _counted(broker, filters, int(gauges["folded_sequence"]))
        elif stage == "trainer":
            found[stage] = await _steps(broker, model)
    return found


async def _steps(broker: Broker, model: Model) -> Backlog:
    """Assembled steps that are not trained yet."""
    waiting = max(0, model.assembled_step - model.trained_step)
    if not waiting:
        return Backlog(count=0)
    record = await broker.get(STEP_ASSEMBLED.subject_of(broker.run, model.trained_step + 1))
    return Backlog(count=waiting, oldest_unix_s=record.unix_time_s if record else 0.0)


async def _oldest(broker: Broker, filters: Sequence[str], after: int) -> float:
    async with broker.read(list(filters), after_sequence=after, follow=False, headers_only=True) as records:
        async for record in records:
            return record.unix_time_s
    return 0.0


async def _counted(broker: Broker, filters: Sequence[str], after: int) -> Backlog:
    count, oldest = 0, 0.0
    async with broker.read(list(filters), after_sequence=after, follow=False, headers_only=True) as records:
        async for record in records:
            oldest = oldest or record.unix_time_s
            count += 1
            if count == _COUNTED:
                return Backlog(count=count, at_least=True, oldest_unix_s=oldest)
    return Backlog(count=count, oldest_unix_s=oldest)
