"""What each stage of a run waits for, since when, and how much lies before it."""

from __future__ import annotations

import time
from collections import Counter
from typing import Final

import anyio
import msgspec

from broker.api import Broker, LogStatus
from ops.control import Standing, standing
from ops.engines.listening import heard_engines
from ops.logtools.dead import LetterState, letters
from ops.logtools.sources import LiveSource
from ops.nodes.roll import NodeLine, NodePresence, node_lines
from ops.slurm import job_states
from ops.troubles import Trouble, troubles
from pipeline.metrics import REPORT_PREFIX, WorkerReport
from pipeline.presence import dead_nodes, missing, obituary, roll_call
from pipeline.watchdog import WATCHDOG, Stuck, told
from schemas.messages.engines import EngineAnnouncement

LISTEN_S = 2.5
_FUNCTIONS: Final = {"map_rewards": "rewards", "broadcast_weights": "weights"}
"""Stages whose consumer and dead letters carry their function's name instead of the service's."""

_CREDIT: Final = "credit, "
"""How sampling begins to say that nothing may be issued."""


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
    dead: list[str] = []
    """Processes that vanished without a word, each with its node and batch job."""
    dead_nodes: list[str] = []
    """Nodes, by name, of which no process is left; hosts, where no topology names them."""
    nodes: list[NodeLine] = []
    """Of a run with a topology."""
    is_running: bool = True
    """False: the run is over or stopped; this is what its log holds."""
    asked: Standing = Standing()
    """What people asked of it that is in force: pause or drain."""
    stuck: list[Stuck] = []
    """What the run's watchdog says does not go on."""
    engines: list[EngineAnnouncement] = []
    """Servers behind the router; empty where the engine is in the gateway."""
    troubles: list[Trouble] = []
    """What is wrong, worst first."""

    @property
    def pacing(self) -> str:
        """Groups that may be issued now and what binds that, as sampling says; empty while it says nothing."""
        for stage in self.stages:
            for report in stage.workers:
                if stage.stage == "sampling" and "capacity" in report.gauges:
                    return pacing(report)
        return ""


def pacing(report: WorkerReport) -> str:
    """Sampling's credit in words."""
    gauges, waits_for = report.gauges, report.waiting_for
    capacity = f"capacity {gauges.get('capacity', 0):.0f} groups"
    if waits_for.startswith(_CREDIT):
        return f"{capacity}, {waits_for.removeprefix(_CREDIT)}"
    running, waiting = gauges.get("groups_running", 0), gauges.get("groups_waiting", 0)
    return f"{capacity}: {running:.0f} groups running, {waiting:.0f} waiting"


async def run_status(broker: Broker, stages: tuple[str, ...], *, listen_s: float = LISTEN_S) -> RunStatus:
    """Listen for a moment to all workers of a run, and ask the broker for the rest."""
    reports: dict[tuple[str, str], WorkerReport] = {}
    engines: list[EngineAnnouncement] = []

    lines: list[NodeLine] = []

    async def hear_engines() -> None:
        engines.extend(await heard_engines(broker, listen_s=listen_s))

    async def ask_nodes() -> None:
        lines.extend(await node_lines(broker, is_running=listen_s > 0))

    async with (
        anyio.create_task_group() as tasks,
        broker.listen(f"{REPORT_PREFIX}.{broker.run}.>") as announcements,
    ):
        tasks.start_soon(hear_engines)
        tasks.start_soon(ask_nodes)
        with anyio.move_on_after(listen_s):
            async for _subject, data in announcements:
                report = msgspec.msgpack.decode(data, type=WorkerReport)
                reports[report.stage, report.worker] = report
    watchdogs = [reports.pop(key) for key in list(reports) if key[0] == WATCHDOG]
    stuck = [verdict for report in watchdogs for verdict in told(report)]
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
    now = time.time()
    presences = await roll_call(broker)
    dead = missing(presences, heard=frozenset(worker for _, worker in reports), now=now)
    jobs = await job_states({one.slurm_job for one in dead})
    obituaries = [obituary(one, now=now, job_states=jobs) for one in dead]
    silent_nodes = {line.node for line in lines if line.presence is NodePresence.GONE}
    nodes = sorted({*dead_nodes(presences, dead), *silent_nodes})
    open_letters = Counter(
        service_of(letter.stage) for letter in await letters(LiveSource(broker)) if letter.state is LetterState.OPEN
    )
    return RunStatus(
        run=broker.run,
        unix_time_s=now,
        dead=obituaries,
        dead_nodes=nodes,
        nodes=lines,
        troubles=troubles(
            [*watchdogs, *reports.values()],
            engines=engines,
            dead=obituaries,
            dead_nodes=nodes,
            dead_letters=open_letters,
            now_s=now,
        ),
        log=await broker.log_status(),
        stuck=stuck,
        stages=listed,
        silent=[stage.stage for stage in listed if not stage.workers],
        asked=await standing(broker),
        engines=engines,
    )
