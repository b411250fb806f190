"""Faults of a real run are named within 30 s: in status, top, the metrics, an alert and the report."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import anyio.abc
import psutil
import pytest
from nodes_case import Nodes
from seeing import WITHIN_S, Alerts, Watched, watched
from topologies import ROLLS_OUT, head, rollout_node, topology
from waiting import wait_until

from broker.errors import StoreFullError
from ops.control import ask
from ops.engines.server_process import free_port
from ops.status import run_status
from ops.wiring import STAGES
from pipeline.log import RunLog
from schemas.messages.sampling import ControlAction
from schemas.topics import WEIGHTS_PUBLISHED

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
FAKE_SERVER = ROOT / "tests" / "ops" / "engines" / "fake_server_process.py"
PAYLOAD_BYTES, LOG_BYTES = 24_000_000, 48_000_000
SETTINGS = (
    *("--steps", "100000", "--set", "training.standin_step_s=0.2"),
    *("--set", f"broker.max_payload_store_bytes={PAYLOAD_BYTES}", "--set", f"broker.max_bytes={LOG_BYTES}"),
)


def port_base() -> int:
    """A base above which the run's endpoints fit."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return min(probe.getsockname()[1], 60000)


@pytest.fixture
def tell(record_property):
    """Keep and print the figures of one fault."""

    def told(fault: str, found: dict[str, float]) -> None:
        record_property(fault, json.dumps(found))
        print(f"{fault}: {found}")  # noqa: T201 - the figures, for who runs it

    return told


async def test_faults_of_one_machine(headrace, tell) -> None:
    base = port_base()
    async with (
        headrace(*SETTINGS, "--set", f"metrics.port={base}") as run,
        watched_run(run, base) as seen,
    ):
        for name, fault, kind, what, alert in (
            ("gateway stopped", stopped(run, "gateway"), "stage stuck", "gateway", "HeadraceStageStuck"),
            ("trainer stopped", stopped(run, "trainer"), "stage stuck", "trainer", "HeadraceStageStuck"),
            ("Arena stopped", stopped(run, "arena"), "arena away", "arena_launch", "HeadraceArenaAway"),
            ("payloads fill up", big_payload(run), "store full", "retention", "HeadraceStoreFull"),
            ("log refuses messages", many_messages(run), "store full", "retention", "HeadraceStoreFull"),
            ("weights damaged", damaged_weights(run), "weights refused", "gateway", "HeadraceWeightsRefused"),
            ("lease lost", second_trainer(run), "stage stopped", "trainer", "HeadraceStageStuck"),
        ):
            async with fault:
                tell(name, await seen.until_named(kind, what, alert))
            await seen.until_well(kind, what, alert)  # a stage's last word is told for a minute
            await run.wait_for_step(seen.model.trained_step + 3)
        async with poison(run):
            tell("dead letter", await seen.until_named("dead letters", "rewards", "HeadraceDeadLetters"))
        await seen.alerts.forget_gone()
        async with killed_worker(run, seen):
            tell("worker killed", await seen.until_named("process dead", "rewards", "HeadraceProcessDown"))
        await run.wait_for_step(seen.model.trained_step + 3)
        await the_broker_is_told_to_be_away(run, seen)
        run.interrupt()
        assert await run.process.wait() == 130


async def test_an_engine_server_that_answers_no_more(headrace, with_servers, tell) -> None:
    base, port = port_base(), free_port("127.0.0.1")
    model = with_servers[-1].removeprefix("policy.folder=")
    own = [sys.executable, str(FAKE_SERVER), "--port", str(port), "--model", model, "--parent", str(os.getpid())]
    async with (
        headrace(*SETTINGS, *with_servers, "--set", "engine.count=1", "--set", f"metrics.port={base}") as run,
        ended(await anyio.open_process(own, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)) as server,
        watched_run(run, base) as seen,
    ):
        where = ("--name", "extra", "--run", str(run.folder.path))
        await headrace_command("engine", "register", f"http://127.0.0.1:{port}", *where)
        engines = seen.model.engines
        await wait_until(
            lambda: "extra" in engines and engines["extra"].state.value == "serving",
            "the engine to serve",
            deadline_s=60,
        )
        server.suspend()
        found = await seen.until_named("engine quarantined", "extra", "HeadraceEngineQuarantined")
        tell("engine's server stopped", found)

        def is_waited_for() -> bool:
            """Nobody may start it again: it is named for as long as it is away."""
            assert seen.names("engine quarantined", "extra")
            return "waiting for the server" in engines["extra"].reason

        await wait_until(is_waited_for, "the server to be waited for", deadline_s=60)
        assert seen.names("engine quarantined", "extra")
        server.resume()
        await seen.until_well("engine quarantined", "extra", "HeadraceEngineQuarantined")
        await run.wait_for_step(seen.model.trained_step + 3)
        run.interrupt()
        assert await run.process.wait() == 130


@asynccontextmanager
async def ended(process: anyio.abc.Process) -> AsyncGenerator[psutil.Process]:
    """A process that is killed in the end, whether it is stopped or not."""
    async with process:
        try:
            yield psutil.Process(process.pid)
        finally:
            process.kill()


class Machines(Nodes):
    """Each node has a host name of its own, as on machines of their own."""

    def command(self, node: str) -> list[str]:
        return ["unshare", "--uts", "sh", "-c", 'hostname "$0"; exec "$@"', node, *super().command(node)]


async def test_a_node_that_is_gone(tmp_path, tell) -> None:
    if subprocess.run(["unshare", "--uts", "true"], check=False, capture_output=True).returncode:  # noqa: ASYNC221 - short
        reason = "a node with a host name of its own needs the right to `unshare --uts`"
        (pytest.fail if os.environ.get("CI") else pytest.skip)(reason)
    base = port_base()
    settings = ("training.standin_step_s=0.8", f"metrics.port={base}")
    two_nodes = topology(head(*ROLLS_OUT), rollout_node(1), settings=settings)
    run = Machines(tmp_path, "nodes", 100_000, two_nodes)
    try:
        with anyio.fail_after(240):
            await run.up("head")
            await run.until_keys()
            await run.up("rollout-1")
            await run.until_ready("head", "rollout-1")
            await run.until_step(2)
        alerts = Alerts(base, ("127.0.0.2", "127.0.0.3"))
        async with watched("nodes", tmp_path / "nodes" / "head", run.broker, alerts) as seen:
            run.kill("rollout-1")
            tell("node killed", await seen.until_named("node gone", "rollout-1", "HeadraceNodeGone"))
            with anyio.fail_after(120):
                await run.up("rollout-1")
                await run.until_ready("rollout-1")
                await seen.until_well("node gone", "rollout-1", "HeadraceNodeGone")
    finally:
        await run.end()


@asynccontextmanager
async def watched_run(run, base: int) -> AsyncGenerator[Watched]:
    """A run of one machine that has trained some steps."""
    await run.wait_for_step(2, deadline_s=150.0)
    async with watched("smoke", run.folder.path, run.broker, Alerts(base)) as seen:
        yield seen


# Faults: each begins when its block does, and is over after it.


@asynccontextmanager
async def stopped(run, kind: str) -> AsyncGenerator[None]:
    victim = run.children()[kind]
    victim.suspend()
    try:
        yield
    finally:
        victim.resume()


@asynccontextmanager
async def big_payload(run) -> AsyncGenerator[None]:
    """Somebody puts a file into the payload store that leaves little room."""
    async with run.broker() as broker:
        ref = await broker.payloads.put(os.urandom(int(0.9 * PAYLOAD_BYTES)))
        yield
        await broker.payloads.delete(ref.id)


@asynccontextmanager
async def many_messages(run) -> AsyncGenerator[None]:
    """Somebody writes on the run's log until it takes no message more."""
    async with run.broker() as broker:
        number, size = 0, 500_000
        while size > 100:
            try:
                await broker.publish(f"hr.smoke.noise.{number}", os.urandom(size))
                number += 1
            except StoreFullError:
                size //= 4
        yield
        await broker.purge_below((await broker.log_status()).last_sequence + 1, pattern="hr.smoke.noise.>")


@asynccontextmanager
async def damaged_weights(run) -> AsyncGenerator[None]:
    """A bit of the newest version flips on its disk while nothing is trained, and the gateway has to load it anew."""
    async with run.broker() as broker:
        await ask(broker, ControlAction.PAUSE)
        while await under_way(broker):
            pass
        async with RunLog(broker).read([WEIGHTS_PUBLISHED], follow=False) as entries:
            published = [entry.message async for entry in entries][-1]
        flip_last_bit(Path(published.directory))
        run.children()["gateway"].kill()
        yield
        flip_last_bit(Path(published.directory))
        await ask(broker, ControlAction.RESUME)


def flip_last_bit(folder: Path) -> None:
    (file,) = folder.glob("*.safetensors")
    found = file.read_bytes()
    file.write_bytes(found[:-1] + bytes([found[-1] ^ 1]))


async def under_way(broker) -> bool:
    """Whether a group or a step still is."""
    status = await run_status(broker, STAGES, listen_s=1.5)
    gauges = {stage.stage: stage.workers[0].gauges for stage in status.stages if stage.workers}
    newest = gauges["trainer"]["step"]
    return bool(gauges["sampling"]["groups_running"]) or gauges["gateway"]["version"] < newest


@asynccontextmanager
async def second_trainer(run) -> AsyncGenerator[None]:
    """Somebody starts a trainer beside the run's: the one that had the lease stops. Started again it takes the lease back."""
    with (run.folder.logs / "second.log").open("wb") as log:
        process = worker(run, "trainer", log)
    log_file = run.folder.logs / "second.log"  # the fault begins when it takes the lease
    await wait_until(lambda: b"lease taken" in log_file.read_bytes(), "lease taken", deadline_s=60)
    yield
    await wait_until(lambda: process.poll() is not None, "the end of the second trainer", deadline_s=60)


def worker(run, stage: str, log) -> subprocess.Popen:
    """A worker that nobody looks after."""
    command = [sys.executable, "-m", "ops", "worker", stage, "--run-dir", str(run.folder.path)]
    return subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1"})


@asynccontextmanager
async def poison(run) -> AsyncGenerator[None]:
    """A message that no stage can decode."""
    async with run.broker() as broker:
        await broker.publish("hr.smoke.episode.ended.poison.0.0", b"\xff\x00")
    yield


@asynccontextmanager
async def killed_worker(run, seen: Watched) -> AsyncGenerator[None]:
    """A worker that was started by hand, and that nobody starts again, is killed."""
    async with run.broker() as broker:
        with (run.folder.logs / "third.log").open("wb") as log:
            process = worker(run, "rewards", log)
        with anyio.fail_after(60):
            while not any(str(process.pid) in name for name in await workers(broker, "rewards")):
                pass
    await seen.alerts.hold()  # its endpoint is known from now on
    process.kill()
    process.wait()
    yield


async def workers(broker, stage: str) -> list[str]:
    found = await run_status(broker, STAGES, listen_s=1.5)
    return [report.worker for one in found.stages if one.stage == stage for report in one.workers]


async def the_broker_is_told_to_be_away(run, seen: Watched) -> None:
    """The log can't be read: the alert and top name it, status says so."""
    victim = run.children()["nats"]
    victim.suspend()
    await wait_until(
        lambda: "HeadraceBrokerAway" in seen.alerts.fires and seen.model.problem, "the broker away", deadline_s=WITHIN_S
    )
    said = await headrace_command("status", str(run.folder.path), code=1)
    assert "did not answer" in said
    victim.resume()


async def headrace_command(*arguments: str, code: int = 0) -> str:
    """What a command says."""
    done = await anyio.run_process([sys.executable, "-m", "ops", *arguments], cwd=ROOT, check=False)
    said = (done.stdout + done.stderr).decode()
    assert done.returncode == code, said
    return said
