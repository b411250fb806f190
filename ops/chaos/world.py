"""The run under chaos as processes: started, found, watched, started again; nobody of it may be left behind.

It must not know what a fault is.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import anyio
import anyio.abc
import msgspec
import psutil
import structlog

from ops.run_folder import RunFolder, RunFolderError

log = structlog.get_logger("headrace.chaos")

ORPHAN_DEADLINE_S: Final = 10.0
"""By when all descendants of a killed supervisor must be gone."""
_STOP_S: Final = 60.0
_LAST_LINES: Final = 8

_MARKS: Final[Mapping[str, tuple[str, ...]]] = {
    "arena": ("ops.arena", "arena.json"),
    "arena_pool": ("ops.arena.harness_process",),
    "agent": ("agents/process.py",),
    **{
        stage: ("worker", stage)
        for stage in ("sampling", "fan_out", "arena_launch", "rewards", "assembly", "weights", "gateway", "trainer")
    },
}


class RunUnderChaos:
    """One `headrace run` command, again and again."""

    def __init__(self, config: Path, overrides: Sequence[str], folder: Path, environment: Mapping[str, str]) -> None:
        self.folder: Final = RunFolder(folder)
        self.num_starts = 0
        self.unasked_ends: Final[list[str]] = []
        """Last lines of the command where it ended though nobody had ended it."""
        self.orphans: Final[list[str]] = []
        """Processes that outlived their supervisor."""
        self._config: Final = config
        self._overrides: Final = overrides
        self._environment: Final = environment
        self._log: Final = folder.parent / "run.log"
        self._process: anyio.abc.Process | None = None
        self._extra: Final[list[anyio.abc.Process]] = []

    @property
    def pid(self) -> int:
        """Of the supervisor; 0 while it does not run."""
        return 0 if self._process is None or self._process.returncode is not None else self._process.pid

    async def start(self) -> None:
        """Start the command; the same one resumes."""
        self.num_starts += 1
        arguments = [argument for override in self._overrides for argument in ("--set", override)]
        self._process = await self._open("run", str(self._config), "--json", "--quiet", *arguments)

    async def watch_first_start(self) -> None:
        """For ever.

        Raises:
            TimeoutError: the command ended by itself: the config or the machine can't do it.
        """
        while True:
            process = self._process
            if process is not None and process.returncode is not None:
                raise TimeoutError(f"the run ended at its first start: {' | '.join(self.last_lines())}")
            await anyio.sleep(0.1)

    async def join(self, stage: str) -> anyio.abc.Process:
        """Start another worker of a stage, beside the supervised ones."""
        tied = {"HEADRACE_PARENT_PID": str(os.getpid())}
        worker = await self._open("worker", stage, "--run-dir", str(self.folder.path), environment=tied)
        self._extra.append(worker)
        return worker

    async def end_extra(self, worker: anyio.abc.Process) -> None:
        """Kill -9 of a worker that joined."""
        if worker.returncode is None:
            worker.kill()
        await worker.wait()
        self._extra.remove(worker)

    async def _open(self, *arguments: str, environment: Mapping[str, str] | None = None) -> anyio.abc.Process:
        with self._log.open("ab") as sink:
            return await anyio.open_process(
                [sys.executable, "-m", "ops", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=sink,
                env={**os.environ, **self._environment, **(environment or {})},
            )

    def pids(self, kind: str) -> list[int]:
        """Processes of a kind, `supervisor` included."""
        if kind == "supervisor":
            return [self.pid] if self.pid else []
        found: list[int] = []
        for process in self._descendants():
            try:
                line = process.cmdline()
            except (psutil.NoSuchProcess, psutil.ZombieProcess):
                continue
            if all(any(mark == word or word.endswith(mark) for word in line) for mark in _MARKS[kind]):
                found.append(process.pid)
        # The leash before the agent has its path on its own command line, too: its child is the agent itself.
        return found[-1:] if kind == "agent" else found

    def _descendants(self) -> list[psutil.Process]:
        try:
            return psutil.Process(self.pid).children(recursive=True) if self.pid else []
        except psutil.NoSuchProcess:
            return []

    async def kill_supervisor(self) -> None:
        """Kill -9; returns when none of its descendants is left, or notes those that are."""
        descendants = self._descendants()
        process = self._process
        if process is None:
            return
        process.kill()
        await process.wait()
        with anyio.move_on_after(ORPHAN_DEADLINE_S):
            while any(map(_lives, descendants)):
                await anyio.sleep(0.02)
        for left in filter(_lives, descendants):
            self.orphans.append(_describe(left))
            left.kill()

    async def interrupt(self) -> int:
        """Ctrl-C; the command's exit code."""
        process = self._process
        if process is None:
            return 0
        descendants = self._descendants()
        if process.returncode is None:
            process.send_signal(signal.SIGINT)
        with anyio.move_on_after(_STOP_S):
            await process.wait()
        if process.returncode is None:
            self.unasked_ends.append(f"the command did not end within {_STOP_S:g} s after Ctrl-C")
            process.kill()
            await process.wait()
        for left in filter(_lives, descendants):
            self.orphans.append(_describe(left))
            left.kill()
        return process.returncode or 0

    async def mend(self) -> bool:
        """Start the command again where it ended by itself; whether it did."""
        process = self._process
        if process is None or process.returncode is None:
            return False
        self.unasked_ends.append(f"exit code {process.returncode}: {' | '.join(self.last_lines())}")
        await self.start()
        return True

    async def stop(self) -> None:
        """End everything."""
        for worker in list(self._extra):
            await self.end_extra(worker)
        if self.pid:
            await self.interrupt()

    def last_lines(self) -> list[str]:
        """The end of what the command wrote."""
        if not self._log.is_file():
            return []
        return self._log.read_text(encoding="utf-8", errors="replace").splitlines()[-_LAST_LINES:]

    def gateway_url(self) -> str:
        """Where the run's gateway listens; empty before the first start has said it."""
        try:
            endpoints = self.folder.read_endpoints()
        except (RunFolderError, msgspec.DecodeError):
            return ""
        return f"http://127.0.0.1:{endpoints.gateway_port}"


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _describe(process: psutil.Process) -> str:
    try:
        return f"{process.pid}: {' '.join(process.cmdline())[:200]}"
    except psutil.NoSuchProcess:
        return str(process.pid)
