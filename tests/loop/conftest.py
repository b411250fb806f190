from __future__ import annotations

import json
import os
import re
import signal
import sys
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import anyio.abc
import anyio.lowlevel
import psutil
import pytest
from waiting import wait_until

from broker.api import Broker
from ops.connection import connect_to
from ops.run_folder import Endpoints, RunFolder, RunFolderError
from pipeline.log import RunLog
from schemas.topics import STEP_TRAINED
from stages.policy.byte_level import write_tokenizer_files
from stages.training.standin import StandInBackend

ROOT = Path(__file__).parents[2]
# importlib mode leaves sys.path alone, and the tests of this folder import what they share by name.
sys.path.insert(0, str(Path(__file__).parent))
from nodes_case import Nodes  # noqa: E402 - see above

SMOKE = ROOT / "examples" / "smoke.toml"
FAKE_SERVER = ROOT / "tests" / "ops" / "engines" / "fake_server_process.py"


class RunProcess:
    """A `headrace run` in a process of its own."""

    def __init__(self, process: anyio.abc.Process, folder: Path) -> None:
        self.process = process
        self.folder = RunFolder(folder)
        self.stdout = b""
        self.stderr = b""

    def children(self) -> dict[str, psutil.Process]:
        """Its direct children by kind; workers of engines by the engine's name."""
        found: dict[str, psutil.Process] = {}
        try:
            children = psutil.Process(self.process.pid).children()
        except psutil.NoSuchProcess:
            return found
        for child in children:
            try:
                line = " ".join(child.cmdline())
            except psutil.NoSuchProcess:
                continue
            for kind, mark in (
                ("nats", "nats-server"),
                ("arena", "ops.arena"),
                ("gateway", "worker gateway"),
                ("stages", "worker sampling"),
                ("trainer", "trainer"),
            ):
                if mark in line and child.is_running():
                    found[kind] = child
            if (engine := re.search(r"worker engine --name (\S+)", line)) and child.is_running():
                found[engine[1]] = child
        return found

    @asynccontextmanager
    async def broker(self) -> AsyncGenerator[Broker]:
        """A connection to its broker."""
        async with connect_to(self.folder.read_endpoints(), name="test") as broker:
            yield broker

    async def wait_for_endpoints(self) -> Endpoints:
        """Where its broker is, once it says so."""

        def endpoints() -> Endpoints | None:
            try:
                return self.folder.read_endpoints()
            except RunFolderError:
                assert self.process.returncode is None, self.stderr.decode()
                return None

        return await wait_until(endpoints, "the run's endpoints", deadline_s=120, every_s=0.02)

    async def wait_for_step(self, step: int, *, deadline_s: float = 90.0) -> None:
        """Return when a step was trained."""
        with anyio.fail_after(deadline_s):
            endpoints = await self.wait_for_endpoints()
            async with connect_to(endpoints, name="test") as broker, RunLog(broker).read([STEP_TRAINED]) as entries:
                async for entry in entries:
                    if getattr(entry.message, "step", 0) >= step:
                        return

    def interrupt(self) -> None:
        os.kill(self.process.pid, signal.SIGINT)

    async def result(self) -> dict:
        """Its JSON line, once it ended well."""
        code = await self.process.wait()
        await anyio.lowlevel.checkpoint()
        assert code == 0, self.stderr.decode()[-4000:]
        return json.loads(self.stdout.decode().strip().splitlines()[-1])


@pytest.fixture
def headrace(tmp_path: Path):
    """Start `headrace run CONFIG --json` in tmp_path/run."""

    @asynccontextmanager
    async def start(*arguments: str, config: Path = SMOKE, folder: Path | None = None) -> AsyncGenerator[RunProcess]:
        run_dir = folder or tmp_path / "run"
        command = [sys.executable, "-m", "ops", "run", str(config), "--json", "--set", f"run.dir={run_dir}", *arguments]
        process = await anyio.open_process(command, cwd=ROOT, stdin=None)
        run = RunProcess(process, run_dir)
        async with anyio.create_task_group() as tasks:

            async def collect(stream: anyio.abc.ByteReceiveStream, name: str) -> None:
                async for chunk in stream:
                    setattr(run, name, getattr(run, name) + chunk)

            tasks.start_soon(collect, process.stdout, "stdout")
            tasks.start_soon(collect, process.stderr, "stderr")
            try:
                yield run
            finally:
                if process.returncode is None:
                    process.terminate()
                    with anyio.move_on_after(15, shield=True):
                        await process.wait()
                    if process.returncode is None:
                        process.kill()

    return start


@pytest.fixture
def with_servers(tmp_path: Path) -> tuple[str, ...]:
    """Arguments of a run that samples from two fake vLLM servers, and whose policy fits the stand-in trainer."""
    folder = tmp_path / "policy"
    StandInBackend(str(tmp_path / "checkpoints")).export_weights(str(folder))
    write_tokenizer_files(folder, max_context=256)
    (folder / "config.json").write_text('{"model_type": "qwen3", "vocab_size": 264}')
    command = json.dumps([sys.executable, str(FAKE_SERVER)])
    return (
        *("--set", "engine.kind=vllm", "--set", "engine.count=2", "--set", f"engine.command={command}"),
        *("--set", f"policy.folder={folder}"),
    )


@pytest.fixture
async def nodes(tmp_path: Path) -> AsyncGenerator[Callable[[str, int, str], Nodes]]:
    """Make the nodes of a run by its name, number of steps and topology."""
    made: list[Nodes] = []

    def make(run: str, steps: int, topology: str) -> Nodes:
        made.append(Nodes(tmp_path, run, steps, topology))
        return made[-1]

    yield make
    for one in made:
        await one.end()
