"""Faults of a real run are seen within 30 s, by name: in status, top, the metrics with their alert, and the report."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import httpx
import msgspec
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from ops.status import run_status
from ops.top.model import Model
from ops.top.watching import watch
from ops.troubles import Trouble
from ops.wiring import STAGES

sys.path.insert(0, str(Path(__file__).parents[1] / "ops" / "metrics"))

from firing import firing

ROOT = Path(__file__).parents[2]
WITHIN_S = 30.0
SETTINGS = ("--steps", "100000", "--set", "training.standin_step_s=0.2")


def port_base() -> int:
    """A base above which the run's endpoints fit."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return min(probe.getsockname()[1], 60000)


async def alerts(base: int) -> set[str]:
    """What fires on everything that the run's processes serve."""
    series = []
    async with httpx.AsyncClient(timeout=1.0) as http:
        for place in range(12):
            try:
                answer = await http.get(f"http://127.0.0.1:{base + place}/metrics")
            except httpx.HTTPError:
                continue
            for family in text_string_to_metric_families(answer.text):
                series += [(sample.name, sample.labels, sample.value) for sample in family.samples]
    return firing(series)


@asynccontextmanager
async def topped(run):
    """What `headrace top` shows of the run, kept up to date."""
    model = Model("smoke")
    async with run.broker() as broker, anyio.create_task_group() as tasks:
        tasks.start_soon(watch, broker, model)
        yield model
        tasks.cancel_scope.cancel()


async def reported(run) -> list[Trouble]:
    """The troubles in a report that is written now."""
    command = [sys.executable, "-m", "ops", "report", str(run.folder.path), "--json"]
    done = await anyio.run_process(command, cwd=ROOT, check=False)
    return msgspec.convert(json.loads(done.stdout)["troubles"], list[Trouble]) if done.returncode == 0 else []


async def seen(run, model, kind: str, what: str, alert: str, base: int) -> dict[str, float]:
    """Seconds until each place says it by name."""
    began, found = time.monotonic(), {}

    def named(troubles) -> bool:
        return any(one.kind == kind and one.what.startswith(what) for one in troubles)

    async def status() -> bool:
        async with run.broker() as broker:
            return named((await run_status(broker, STAGES, listen_s=1.5)).troubles)

    async def top() -> bool:
        return named(model.troubles(time.time()))

    async def fires() -> bool:
        return alert in await alerts(base)

    async def report() -> bool:
        return named(await reported(run))

    async def wait_for(name, looks) -> None:
        while not await looks():
            await anyio.sleep(0.2)
        found[name] = round(time.monotonic() - began, 1)

    places = {"status": status, "top": top, "alert": fires, "report": report}
    with anyio.move_on_after(WITHIN_S):
        async with anyio.create_task_group() as tasks:
            for name, looks in places.items():
                tasks.start_soon(wait_for, name, looks)
    assert set(found) == set(places), f"{kind}: seen in {found}"
    return found


@pytest.mark.nightly
@pytest.mark.timeout(900)
async def test_faults_of_each_kind_are_named_everywhere_within_30_seconds(headrace, record_property) -> None:
    base = port_base()
    async with headrace(*SETTINGS, "--set", f"metrics.port={base}") as run:
        await run.wait_for_step(2)
        async with topped(run) as model:
            for kind, what, alert, begin, end in (
                ("stage stuck", "gateway", "HeadraceStageStuck", stop("gateway"), resume("gateway")),
                ("stage stuck", "trainer", "HeadraceStageStuck", stop("trainer"), resume("trainer")),
                ("arena away", "arena_launch", "HeadraceArenaAway", stop("arena"), resume("arena")),
                ("dead letters", "rewards", "HeadraceDeadLetters", poison, nothing),
                ("stage stopped", "trainer", "HeadraceStageStuck", second_trainer, until_it_ended),
            ):
                step = model.trained_step
                await begin(run)
                found = await seen(run, model, kind, what, alert, base)
                record_property(f"{kind}, {begin.__name__}", json.dumps(found))
                print(kind, begin.__name__, found)  # noqa: T201 - the figures, for who runs it
                await end(run)
                await run.wait_for_step(step + 3)
        victim = run.children()["nats"]
        victim.suspend()
        with anyio.fail_after(WITHIN_S):
            while "HeadraceBrokerAway" not in await alerts(base):
                await anyio.sleep(0.2)
        looked = await anyio.run_process(
            [sys.executable, "-m", "ops", "status", str(run.folder.path)], cwd=ROOT, check=False
        )
        assert looked.returncode
        assert b"did not answer" in looked.stderr
        victim.resume()
        run.interrupt()
        assert await run.process.wait() == 130


def stop(kind: str):
    async def stopped(run) -> None:
        run.children()[kind].suspend()

    stopped.__name__ = f"stop_{kind}"
    return stopped


def resume(kind: str):
    async def resumed(run) -> None:
        for child in psutil.Process(run.process.pid).children():
            if child.status() == psutil.STATUS_STOPPED:
                child.resume()

    return resumed


async def nothing(run) -> None:
    pass


async def poison(run) -> None:
    """A message that no stage can decode."""
    async with run.broker() as broker:
        await broker.publish("hr.smoke.episode.ended.poison.0.0", b"\xff\x00")


async def second_trainer(run) -> None:
    """Somebody starts a trainer beside the run's: the one that had the lease stops."""
    with (run.folder.logs / "second.log").open("wb") as log:
        process = subprocess.Popen(  # noqa: ASYNC220 - it is only started
            [sys.executable, "-m", "ops", "worker", "trainer", "--run-dir", str(run.folder.path)],
            cwd=ROOT, stdout=log, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
    run.second = process
    with anyio.fail_after(60):  # the fault begins when it takes the lease
        while b"lease taken" not in (run.folder.logs / "second.log").read_bytes():
            await anyio.sleep(0.1)


async def until_it_ended(run) -> None:
    """The run's trainer is started again, takes the lease back, and the second one stops."""
    with anyio.fail_after(60):
        while run.second.poll() is None:
            await anyio.sleep(0.1)
