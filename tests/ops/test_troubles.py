"""A fault of each kind is seen by its name in status, top, the metrics, an alert and the report."""

from __future__ import annotations

import os
import socket
import sys
import time
from io import StringIO
from pathlib import Path

import anyio
import msgspec
import pytest
from rich.console import Console

from broker.memory import MemoryBroker, MemoryServer
from ops.accounts import account
from ops.cli.status import _print
from ops.config import decode_config
from ops.logtools.sources import LiveSource
from ops.metrics.definitions import LABELS, samples
from ops.report.gather import gather
from ops.report.page import page
from ops.run_folder import Endpoints, RunFolder
from ops.status import run_status
from ops.top.model import Model
from ops.top.views import head
from ops.troubles import ADVICE, TroubleKind, troubles
from ops.watchdog import RunWatch
from ops.wiring import STAGES, run_service
from ops.workers.arena import _tell_silence, _told_in
from ops.workers.context import WorkerContext
from pipeline.lease import LeaseLostError
from pipeline.metrics import Metrics, WorkerReport, report_subject
from pipeline.presence import TTL_S, PresenceLease
from pipeline.watchdog import WATCHDOG, Stuck
from schemas.config import WatchdogSection
from schemas.messages.engines import EngineAnnouncement, EngineState, engine_subject
from stages.clients.arena.client import ArenaAccess, open_arena
from stages.clients.arena.errors import ArenaConnectionError
from stages.clients.arena.secret import Secret

sys.path.insert(0, str(Path(__file__).parent / "metrics"))

from firing import firing

NOW_S = 1_000_000.0


def report(stage: str, **fields: object) -> WorkerReport:
    return WorkerReport(**{"run": "r", "stage": stage, "worker": "node1:7", "unix_time_s": time.time(), **fields})


def stuck(stage: str, kind: str, waits_for: str) -> WorkerReport:
    """The watchdog's report about one stage."""
    verdict = Stuck(stage=stage, kind=kind, waits_for=waits_for, since_unix_s=time.time() - 21)
    name = f"stuck.{stage}"
    return report(WATCHDOG, gauges={name: 21.0}, labels={name: msgspec.json.encode(verdict).decode()})


QUARANTINED = EngineAnnouncement(
    name="vllm-0", kind="vllm", state=EngineState.QUARANTINED, reason="probe gave other tokens", unix_time_s=NOW_S
)
FAULTS = {
    "stage stuck": (stuck("rewards", "silent", "a sign of life"), "rewards", "HeadraceStageStuck"),
    "stage stopped": (
        stuck("trainer", "stopped", "LeaseLostError: superseded"),
        "LeaseLostError",
        "HeadraceStageStuck",
    ),
    "broker away": (stuck("broker", "silent", "the broker's answer"), "broker", "HeadraceBrokerAway"),
    "node gone": (
        report(WATCHDOG, gauges={"gone.node2": 1.0}, labels={"gone.node2": "none of its processes is left"}),
        "node2",
        "HeadraceNodeGone",
    ),
    "store full": (
        report("retention", gauges={"blocked": 1.0}, labels={"store_error": "blocked: store full: log 96 %"}),
        "log 96 %",
        "HeadraceStoreFull",
    ),
    "arena away": (
        report("arena_launch", labels={"arena_error": "GET /x: no answer"}),
        "no answer",
        "HeadraceArenaAway",
    ),
    "engine quarantined": (
        report("gateway", labels={"engine_state": "half loaded"}),
        "half loaded",
        "HeadraceEngineQuarantined",
    ),
    "weights refused": (
        report("gateway", labels={"weights_error": "version 3: tensor b is missing"}),
        "tensor b",
        "HeadraceWeightsRefused",
    ),
}


def series(reports):
    for sample in samples(reports):
        names = (*LABELS, sample.definition.label) if sample.definition.label else LABELS
        yield sample.definition.name, dict(zip(names, sample.labels, strict=True)), sample.value


async def announced(broker, *reports):
    """Announce reports again and again, as workers do."""
    while True:
        for one in reports:
            fresh = msgspec.structs.replace(one, unix_time_s=time.time())
            await broker.announce(report_subject("r", one.stage), msgspec.msgpack.encode(fresh))
        await anyio.sleep(0.01)


@pytest.mark.parametrize("name", FAULTS)
async def test_a_fault_is_seen_by_name_in_status_top_alert_and_report(name):
    told, words, alert = FAULTS[name]
    told = msgspec.structs.replace(told, unix_time_s=time.time())
    broker = MemoryBroker(MemoryServer(), "r")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(announced, broker, told)
        status = await run_status(broker, STAGES, listen_s=0.1)
        tasks.cancel_scope.cancel()
    (trouble,) = [one for one in status.troubles if one.kind == name]
    assert words in str(trouble)

    printed = StringIO()
    _print(status, Console(file=printed, width=300))
    assert f"{name}: " in printed.getvalue()
    assert f"→ {ADVICE[TroubleKind(name)]}" in printed.getvalue()

    model = Model("r")
    model.take_report(told)
    model.position = 1
    assert f"{name}: " in head(model, 200, time.time()).plain

    figures = msgspec.structs.replace(await gather(LiveSource(broker)), troubles=status.troubles)
    assert f">{name}</td>" in page(figures)

    assert alert in firing(series([told]))


def test_every_kind_of_trouble_is_in_the_table_or_has_a_test_of_its_own():
    own = {TroubleKind.DEAD_LETTERS, TroubleKind.PROCESS_DEAD, TroubleKind.STAGE_ERROR}
    assert {TroubleKind(name) for name in FAULTS} | own == set(TroubleKind)


def test_each_kind_says_what_to_do_in_status_and_in_a_wide_top():
    assert set(ADVICE) == set(TroubleKind)
    model = Model("r")
    model.take_report(msgspec.structs.replace(FAULTS["arena away"][0], unix_time_s=time.time()))
    model.position = 1
    advice = f"→ {ADVICE[TroubleKind.ARENA_AWAY]}"
    assert advice in head(model, 200, time.time()).plain
    assert "→" not in head(model, 80, time.time()).plain


def test_an_engine_that_its_worker_and_its_announcement_tell_of_is_one_trouble():
    told = report("engine", labels={"engine": "vllm-0", "engine_state": "no answer within 5 s"})
    announced = msgspec.structs.replace(QUARANTINED, reason="no answer within 5 s")
    assert [str(one) for one in troubles([told], engines=[announced], now_s=NOW_S)] == [
        "engine quarantined: vllm-0: no answer within 5 s"
    ]


def test_nothing_is_wrong_with_a_healthy_run_and_no_alert_fires():
    healthy = [
        report(stage, waiting_for="messages", waiting_since_unix_s=time.time(), labels={"broker": "nats://x"})
        for stage in STAGES
    ]
    assert troubles(healthy, now_s=NOW_S) == []
    assert firing(series(healthy)) == set()


def test_two_witnesses_of_one_fault_tell_it_once_and_the_worst_comes_first():
    found = troubles(
        [FAULTS["weights refused"][0], FAULTS["broker away"][0]],
        engines=[QUARANTINED, QUARANTINED],
        dead_letters={"rewards": 2, "fan_out": 0},
        dead=["trainer on node1 (pid 9)"],
        now_s=NOW_S,
    )
    assert [one.kind for one in found] == [
        "broker away",
        "process dead",
        "engine quarantined",
        "weights refused",
        "dead letters",
    ]


async def test_an_engine_in_quarantine_is_a_trouble_of_status(wait_until):
    broker = MemoryBroker(MemoryServer(), "r")

    async def announce():
        while True:
            await broker.announce(engine_subject("r", QUARANTINED.name), msgspec.msgpack.encode(QUARANTINED))
            await anyio.sleep(0.01)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(announce)
        status = await run_status(broker, STAGES, listen_s=0.1)
        tasks.cancel_scope.cancel()
    assert [str(one) for one in status.troubles] == ["engine quarantined: vllm-0: probe gave other tokens"]


async def test_open_dead_letters_are_a_trouble_and_counted_from_the_log():
    broker = MemoryBroker(MemoryServer(), "r")
    await broker.publish("hr.r.group.issued.bad", b"\xff")
    context = context_of(broker, Path("unused"))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run_service, "fan_out", context)
        with anyio.fail_after(20):
            while not (status := await run_status(broker, STAGES, listen_s=0.05)).troubles:
                pass
        context.drain()
    assert [(one.kind, one.what) for one in status.troubles] == [("dead letters", "fan_out")]
    assert "HeadraceDeadLetters" in firing(series([report("fan_out", dead=1)]))
    assert (await account(broker, staleness_bound=1)).dead_letters == 1


def context_of(broker, folder):
    config = decode_config({"run": {"id": "r"}, "streams": [{"name": "s", "stream_id": "s"}]})
    return WorkerContext(RunFolder(folder), config, Endpoints(run="r"), broker)


async def test_a_stage_that_stops_for_a_reason_says_it_last_and_the_watchdog_keeps_it(
    tmp_path, monkeypatch, wait_until
):
    """A trainer that lost its lease: its process is gone, and started again, but the reason is still told."""
    broker = MemoryBroker(MemoryServer(), "r")
    context = context_of(broker, tmp_path)

    async def trainer(context):
        context.metrics("trainer")
        raise LeaseLostError("lease trainer.lease: generation 3 was superseded")

    monkeypatch.setattr("ops.wiring._service", lambda stage: trainer)
    watch = RunWatch(broker, WatchdogSection())
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(watch.run)
        await anyio.wait_all_tasks_blocked()
        with pytest.raises(LeaseLostError):
            await run_service("trainer", context)
        await broker.announce(report_subject("r", "trainer"), msgspec.msgpack.encode(report("trainer", worker="h:8")))
        await wait_until(lambda: watch.metrics.labels)
        status = await run_status(broker, STAGES, listen_s=1.2)
        tasks.cancel_scope.cancel()
    (trouble,) = status.troubles
    assert (trouble.kind, trouble.what) == ("stage stopped", "trainer")
    assert "generation 3 was superseded" in trouble.text


async def test_a_node_of_which_no_process_is_left_is_named_by_the_watchdog():
    broker = MemoryBroker(MemoryServer(), "r")
    long_ago = PresenceLease(broker, "trainer.0", ["trainer"], now=lambda: time.time() - TTL_S - 1)
    await long_ago.renew()
    watch = RunWatch(broker, WatchdogSection())
    await watch.look()
    (told,) = watch.reports()
    assert [name for name in told.gauges if name.startswith("gone.")]
    assert "HeadraceNodeGone" in firing(series([told]))
    await long_ago.leave()
    await watch.look()
    assert not watch.metrics.gauges


async def test_a_worker_that_took_its_leave_is_not_missed_and_one_that_fell_silent_is(wait_until):
    broker, clock = MemoryBroker(MemoryServer(), "r"), [0.0]
    lease = PresenceLease(broker, "rewards.0", ["rewards"], now=time.time)
    await lease.renew()
    watch = RunWatch(broker, WatchdogSection(), now=lambda: clock[0])
    own = f"{socket.gethostname()}:{os.getpid()}"
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(watch.run)
        await anyio.wait_all_tasks_blocked()
        await broker.announce(report_subject("r", "rewards"), msgspec.msgpack.encode(report("rewards", worker=own)))
        await wait_until(lambda: watch._heard)
        tasks.cancel_scope.cancel()
    clock[0] = 3600.0
    await watch.look()
    assert [(one.stage, one.kind, one.worker) for one in watch.stuck] == [("rewards", "silent", own)]
    await lease.leave()
    await watch.look()
    assert not watch.stuck


async def test_an_arena_that_does_not_answer_is_told_until_it_does():
    metrics = Metrics("r", "arena_launch")
    heard = _told_in(metrics)
    access = ArenaAccess(
        base_url="http://127.0.0.1:9",
        token=Secret("t"),
        llm_api_key=Secret("k"),
        request_timeout_s=2.0,
        request_retries=0,
    )
    async with open_arena(access, heard=heard) as arena:
        with pytest.raises(ArenaConnectionError):
            await arena.task_result("task")
    assert "GET /openapi/v1" in metrics.labels["arena_error"]
    heard("")
    assert metrics.labels == {}


async def test_an_arena_that_takes_requests_and_answers_none_is_told_before_they_time_out(wait_until, monkeypatch):
    monkeypatch.setattr("ops.workers.arena._SILENT_S", 0.05)
    metrics = Metrics("r", "arena_launch")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        access = ArenaAccess(base_url=url, token=Secret("t"), llm_api_key=Secret("k"))
        async with open_arena(access, heard=_told_in(metrics)) as arena, anyio.create_task_group() as tasks:
            assert arena.silent_s() == 0
            tasks.start_soon(arena.task_result, "task")
            tasks.start_soon(_tell_silence, arena, metrics)
            await wait_until(lambda: "arena_error" in metrics.labels)
            tasks.cancel_scope.cancel()
    assert metrics.labels["arena_error"].startswith("no answer for")
