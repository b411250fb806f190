"""`headrace up` of the nodes of a topology, each in a process of its own, for tests."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import anyio
import anyio.abc
import psutil
from alive import lives
from waiting import wait_until

from ops.connection import connect_to
from ops.engines.server_process import free_port
from ops.nodes.file import load_cluster
from ops.run_folder import RunFolder
from pipeline.log import RunLog
from schemas.topics import SESSION_OPENED, STEP_TRAINED

ROOT = Path(__file__).parents[2]
SMOKE = ROOT / "examples" / "smoke.toml"


class Nodes:
    """`headrace up` of each node of a topology, in processes of their own."""

    def __init__(self, folder: Path, run: str, steps: int, topology: str) -> None:
        self.file = folder / f"{run}.toml"
        self.run = run
        self.port = free_port("127.0.0.2")
        self.file.write_text(
            topology.format(
                config=SMOKE, run=run, folder=folder, steps=steps, port=self.port, cluster_port=self.port + 1
            )
        )
        self.processes: dict[str, anyio.abc.Process] = {}
        self.folder = folder

    def command(self, node: str) -> list[str]:
        """What is typed on a node."""
        return [sys.executable, "-m", "ops", "up", str(self.file), "--node", node, "--json"]

    async def up(self, node: str) -> None:
        sink = (self.folder / f"{self.run}.{node}.log").open("ab")
        out = (self.folder / f"{self.run}.{node}.json").open("wb")
        with sink, out:
            self.processes[node] = await anyio.open_process(
                self.command(node), cwd=ROOT, stdin=subprocess.DEVNULL, stdout=out, stderr=sink, start_new_session=True
            )

    def kill(self, node: str) -> None:
        """As a machine that loses its power: the supervisor is gone, and its processes with it."""
        os.kill(self.processes[node].pid, signal.SIGKILL)

    async def until_dead(self, node: str) -> None:
        """Kill a node and return when none of its processes is left: whoever connects now finds no server that is just dying."""
        children = psutil.Process(self.processes[node].pid).children(recursive=True)
        self.kill(node)
        await self.processes[node].wait()
        await wait_until(lambda: not any(lives(child.pid) for child in children), f"the end of {node}'s processes")

    def workers(self, node: str, words: str) -> list[psutil.Process]:
        """A node's processes with these words in their command line."""
        found: list[psutil.Process] = []
        for process in psutil.Process(self.processes[node].pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):  # it has just ended
                if words in " ".join(process.cmdline()):
                    found.append(process)
        return found

    async def until_ready(self, *nodes: str) -> None:
        for node in nodes:
            folder = RunFolder(load_cluster(self.file).run_dir(node))

            def is_ready(node: str = node, folder: RunFolder = folder) -> bool:
                assert self.processes[node].returncode is None, self.said(node)
                return folder.is_ready(self.processes[node].pid)

            await wait_until(is_ready, f"{node} to be ready", deadline_s=200, every_s=0.05)

    async def until_keys(self) -> None:
        """Until the control node has made the keys that the others get a copy of."""

        def are_there() -> bool:
            assert self.processes["head"].returncode is None, self.said("head")
            return (self.folder / f"{self.run}.secrets.json").exists()

        await wait_until(are_there, "the run's keys", deadline_s=200, every_s=0.05)

    def said(self, node: str) -> str:
        return (self.folder / f"{self.run}.{node}.log").read_text()[-4000:]

    @asynccontextmanager
    async def broker(self) -> AsyncGenerator:
        async with connect_to(RunFolder(self.folder / self.run / "head").read_endpoints(), name="test") as broker:
            yield broker

    async def until_step(self, step: int) -> None:
        async with self.broker() as broker, RunLog(broker).read([STEP_TRAINED]) as entries:
            async for entry in entries:
                if entry.message.step >= step:
                    return

    async def until_session_at(self, node: str, after: int = 0) -> None:
        """Until a gateway of this node took up a session after that sequence."""
        async with self.broker() as broker, RunLog(broker).read([SESSION_OPENED], after_sequence=after) as entries:
            async for entry in entries:
                if entry.message.gateway.startswith(f"gw-{node}-"):
                    return

    async def result(self) -> dict:
        code = await self.processes["head"].wait()
        assert code == 0, self.said("head")
        return json.loads((self.folder / f"{self.run}.head.json").read_text().splitlines()[-1])

    async def headrace(self, *arguments: str, code: int = 0) -> str:
        """What another command says."""
        done = await anyio.run_process([sys.executable, "-m", "ops", *arguments], cwd=ROOT, check=False)
        said = (done.stdout + done.stderr).decode()
        assert done.returncode == code, said
        return said

    async def end(self) -> None:
        for process in self.processes.values():
            if process.returncode is None:
                process.terminate()
        with anyio.move_on_after(30, shield=True):
            for process in self.processes.values():
                await process.wait()
        for process in self.processes.values():
            if process.returncode is None:
                process.kill()
