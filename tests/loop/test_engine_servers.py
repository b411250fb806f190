"""Runs whose engines are servers: fake ones here, started, watched and killed as real ones are."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import anyio
import anyio.lowlevel
import psutil

from ops.engines.listening import heard_engines
from ops.engines.server_process import free_port
from pipeline.log import RunLog
from schemas.messages.engines import EngineAnnouncement, EngineState
from schemas.messages.training import WeightsLoaded
from schemas.topics import STEP_TRAINED, WEIGHTS_LOADED

FAKE = Path(__file__).parents[1] / "ops" / "engines" / "fake_server_process.py"


def servers(run, commands) -> list[psutil.Process]:
    """The fake servers below a run, without their leashes."""
    family = commands(psutil.Process(run.process.pid).children(recursive=True))
    return [one for one, line in family if line.split()[1:2] == [str(FAKE)]]


async def engines(run) -> dict[str, EngineAnnouncement]:
    async with run.broker() as broker:
        return {one.name: one for one in await heard_engines(broker, listen_s=1.2)}


async def last_step(run) -> int:
    async with run.broker() as broker, RunLog(broker).read([STEP_TRAINED], follow=False) as entries:
        return max([entry.message.step async for entry in entries])


async def loaded(run) -> list[WeightsLoaded]:
    async with run.broker() as broker, RunLog(broker).read([WEIGHTS_LOADED], follow=False) as entries:
        return [entry.message async for entry in entries]


async def test_a_run_starts_its_servers_survives_the_death_of_one_and_leaves_nothing_behind(
    headrace, with_servers, wait_until, commands
) -> None:
    async with headrace("--steps", "4000", *with_servers) as run:
        await run.wait_for_step(2, deadline_s=150.0)
        victim = servers(run, commands)[0]
        victim.send_signal(signal.SIGKILL)
        await wait_until(
            lambda: victim.pid not in (pids := [one.pid for one in servers(run, commands)]) and len(pids) == 2
        )
        worker = run.children()["engine-1"]
        worker.kill()  # its server dies with it; both are started again

        async def both_serve_again() -> bool:
            if run.children().get("engine-1", worker).pid == worker.pid:
                return False
            found = await engines(run)
            return [one.state for one in found.values()] == [EngineState.SERVING] * 2

        await wait_until(both_serve_again, deadline_s=90.0)
        assert {one.engine for one in await loaded(run)} == {"engine-0", "engine-1"}
        before = await last_step(run)
        await run.wait_for_step(before + 3)
        family = psutil.Process(run.process.pid).children(recursive=True)
        run.interrupt()
        assert await run.process.wait() == 130
        await anyio.lowlevel.checkpoint()
        result = json.loads(run.stdout.decode().strip().splitlines()[-1])
    assert (result["unexplained"], result["doubled"]) == (0, 0)
    assert result["steps"] >= before + 3
    _, alive = psutil.wait_procs(family, timeout=10)
    assert not alive


async def test_a_server_that_runs_already_is_registered_used_and_taken_out(headrace, with_servers, wait_until) -> None:
    port = free_port("127.0.0.1")
    url, model = f"http://127.0.0.1:{port}", with_servers[-1].removeprefix("policy.folder=")
    own = [sys.executable, str(FAKE), "--port", str(port), "--model", model, "--parent", str(os.getpid())]
    async with (
        headrace("--steps", "400", *with_servers, "--set", "engine.count=1") as run,
        await anyio.open_process(own, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server,
    ):
        await run.wait_for_step(1, deadline_s=150.0)

        async def headrace_engine(*arguments: str) -> tuple[int, str]:
            command = [sys.executable, "-m", "ops", "engine", *arguments]
            done = await anyio.run_process(command, check=False, stderr=subprocess.STDOUT)
            return done.returncode, done.stdout.decode()

        where = ("--run", str(run.folder.path))
        assert await headrace_engine("register", url, "--name", "extra", *where) == (0, EXTRA)
        async with run.broker() as broker:
            found: dict[str, EngineAnnouncement] = {}

            async def serves() -> bool:
                found.update({one.name: one for one in await heard_engines(broker, listen_s=1.2)})
                return "extra" in found and found["extra"].state is EngineState.SERVING

            await wait_until(serves)
        assert (found["extra"].attached, found["extra"].url) == (True, url)
        assert "extra" in {one.engine for one in await loaded(run)}
        code, text = await headrace_engine("register", url, "--name", "extra", *where)
        assert (code, "an engine of that name is in the run" in text) == (1, True)
        code, text = await headrace_engine("ps", str(run.folder.path), "--json")
        assert {one["name"] for one in json.loads(text)} == {"engine-0", "extra"}
        code, text = await headrace_engine("logs", "extra", *where)
        assert (code, "was not started by this run" in text) == (1, True)
        code, text = await headrace_engine("deregister", "engine-0", *where)
        assert (code, "it comes from the config" in text) == (1, True)
        assert (await headrace_engine("deregister", "extra", *where))[0] == 0
        assert "extra" not in run.children()
        assert server.returncode is None  # it is somebody else's
        run.interrupt()
        await run.process.wait()
        server.kill()


EXTRA = "extra is added; `headrace engine ps` shows when it serves\n"


async def test_a_run_whose_server_never_starts_ends_with_its_last_words(headrace, with_servers) -> None:
    bad = json.dumps([sys.executable, "-c", "import sys; sys.exit('no such flag: --tensor')"])
    async with headrace(*with_servers, "--set", f"engine.command={bad}", "--set", "engine.count=1") as run:
        with anyio.fail_after(150):
            code = await run.process.wait()
            await anyio.lowlevel.checkpoint()
    assert code == 1
    text = " ".join(run.stderr.decode().split())
    assert "no engine is left" in text
    assert "no such flag: --tensor" in text
