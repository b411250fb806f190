"""What each stage of a run waits for, since when, and how much lies before it."""

from __future__ import annotations

import time
from typing import Final

import anyio
import msgspec

from broker.api import Broker, LogStatus
from ops.control import Standing, standing
from pipeline.metrics import REPORT_PREFIX, WorkerReport

LISTEN_S = 2.5
_FUNCTIONS: Final = {"map_rewards": "rewards", "broadcast_weights": "weights"}
"""Stages whose consumer and dead letters carry their function's name instead of the service's."""


def service_of(name: str) -> str:
    """The service, as status names it, of a consumer or a dead letter."""
    return _FUNCTIONS.get(name, name)


class StageStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One stage, all its workers."""

    stage: str
    workers: list[WorkerReport]
    pending: int
    """Messages not yet handed to a worker."""
    in_hand: int
    """Messages handed out and not acknowledged."""


class RunStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A run now."""

    run: str
    unix_time_s: float
    log: LogStatus
    stages: list[StageStatus]
    silent: list[str]
    """Stages with a consumer and no worker that says anything."""
    is_running: bool = True
    """False: the run is over or stopped; this is what its log holds."""
    asked: Standing = Standing()
    """What people asked of it that is in force: pause or drain."""


async def run_status(broker: Broker, stages: tuple[str, ...], *, listen_s: float = LISTEN_S) -> RunStatus:
    """Listen for a moment to all workers of a run, and ask the broker for the rest."""
    reports: dict[tuple[str, str], WorkerReport] = {}
    async with broker.listen(f"{REPORT_PREFIX}.{broker.run}.>") as announcements:
        with anyio.move_on_after(listen_s):
            async for _subject, data in announcements:
                report = msgspec.msgpack.decode(data, type=WorkerReport)
                reports[report.stage, report.worker] = report
    consumers = {service_of(consumer.durable): consumer for consumer in await broker.consumers()}
    listed: list[StageStatus] = []
    for stage in (*stages, *sorted({name for name, _ in reports} - set(stages))):
        consumer = consumers.get(stage)
        listed.append(
            StageStatus(
                stage=stage,
                workers=[report for (name, _), report in sorted(reports.items()) if name == stage],
                pending=0 if consumer is None else consumer.num_pending,
                in_hand=0 if consumer is None else consumer.num_ack_pending,
            )
        )
    return RunStatus(
        run=broker.run,
        unix_time_s=time.time(),
        log=await broker.log_status(),
        stages=listed,
        silent=[stage.stage for stage in listed if not stage.workers],
        asked=await standing(broker),
    )
