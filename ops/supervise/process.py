"""One supervised process: started in a group of its own, restarted with backoff, stopped for good, its log kept.

It must not know what the process does.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, Final

import anyio
import anyio.abc
import msgspec
import structlog

log = structlog.get_logger("headrace.supervisor")

LAST_LINES: Final = 12
EXIT_GIVEN_UP: Final = 78
"""A process that ends with this says that starting it again won't help (EX_CONFIG of sysexits.h)."""


PROGRESS_ENV: Final = "HEADRACE_PROGRESS_FILE"
"""Where a process leaves signs of its progress, see `ProcessSpec.progress_file`."""


class RestartPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """When a process that ended is started again."""

    max_restarts: int = 5
    """Restarts within `window_s`, or in a row without progress however far apart, after which the process is given up."""
    window_s: float = 60.0
    settled_s: float = 3600.0
    """A process that lived for so long made progress, whatever its file says."""
    first_delay_s: float = 0.2
    max_delay_s: float = 10.0


def _size(path: str) -> int:
    """In bytes; 0: there is no such file."""
    try:
        return Path(path).stat().st_size
    except OSError:
        return 0


def changed_at(progress_file: str) -> int:
    """When a file of `ProcessSpec.progress_file` changed, in ns; 0: there is none."""
    try:
        return Path(progress_file).stat().st_mtime_ns if progress_file else 0
    except OSError:
        return 0


class ProcessSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What to start."""

    name: str
    argv: Sequence[str]
    env: Mapping[str, str] = {}
    log_file: str
    """Standard error, and standard output after the ready line."""
    restart: RestartPolicy = RestartPolicy()
    essential: bool = True
    """Giving it up ends the run."""
    waits_for_ready: bool = False
    """Its first line on standard output says that it serves; `on_ready` gets it."""
    ready_deadline_s: float = 60.0
    stop_deadline_s: float = 8.0
    serves_others: bool = False
    """Stopped only when all that don't are gone: they may still need it to clean up."""
    progress_file: str = ""
    """Written by the process whenever it has done something that lasts; empty: having lived for `window_s` counts as that."""
    finishes: bool = False
    """Exit code 0 means that its work is done, not that it must be started again."""


class ProcessGivenUpError(Exception):
    """A process ended too often, or never became ready. The text has its last lines."""

    def __init__(self, text: str, *, for_good: bool = False) -> None:
        super().__init__(text)
        self.for_good: Final = for_good
        """It said itself that starting it again won't help."""


class SupervisedProcess:
    """Runs one ProcessSpec until told to stop."""

    def __init__(
        self,
        spec: ProcessSpec,
        *,
        on_ready: Callable[[str], None] | None = None,
        now: Callable[[], float] = anyio.current_time,
    ) -> None:
        self.spec: Final = spec
        self.num_restarts = 0
        self.ready: Final = anyio.Event()
        self.finished: Final = anyio.Event()
        """Set when it exited with 0 and `finishes`."""
        self._on_ready = on_ready
        self._now = now
        self._process: anyio.abc.Process | None = None
        self._stopping = False
        self._log_begins: Final = _size(spec.log_file)

    @property
    def pid(self) -> int | None:
        """Process id while it runs."""
        return None if self._process is None or self._process.returncode is not None else self._process.pid

    async def run(self) -> None:
        """Start, watch and restart until `stop`, or until it finished.

        Raises:
            ProcessGivenUpError: it died too often, or again and again without having done anything, or it said that starting it
                again won't help.
        """
        deaths: deque[float] = deque()
        num_fruitless = 0
        while not self._stopping:
            started_s, stood = self._now(), self._progress()
            code = await self._run_once()
            if self._stopping:
                return
            if code == 0 and self.spec.finishes:
                self.finished.set()
                return
            deaths.append(self._now())
            if code == EXIT_GIVEN_UP:
                raise ProcessGivenUpError(self._obituary(code, 1), for_good=True)
            policy = self.spec.restart
            while deaths and deaths[0] < self._now() - policy.window_s:
                deaths.popleft()
            if len(deaths) > policy.max_restarts:
                raise ProcessGivenUpError(self._obituary(code, len(deaths), f"within {policy.window_s:g} s"))
            num_fruitless = 1 if self._was_fruitful(started_s, stood) else num_fruitless + 1
            if num_fruitless > policy.max_restarts:
                raise ProcessGivenUpError(self._obituary(code, num_fruitless, "in a row without any progress"))
            delay_s = min(policy.max_delay_s, policy.first_delay_s * 2 ** (len(deaths) - 1))
            log.warning(
                "a process died and is started again", name=self.spec.name, exit=_exit_text(code), delay_s=delay_s
            )
            self.num_restarts += 1
            await anyio.sleep(delay_s)

    async def stop(self) -> None:
        """SIGTERM to its group, SIGKILL after the deadline. Returns when nothing of the group is left."""
        self._stopping = True
        process = self._process
        if process is None:
            return
        with anyio.CancelScope(shield=True):
            _signal_group(process.pid, signal.SIGTERM)
            with anyio.move_on_after(self.spec.stop_deadline_s):
                await process.wait()
            _signal_group(process.pid, signal.SIGKILL)
            with anyio.move_on_after(5.0):
                await process.wait()

    def kill(self) -> None:
        """SIGKILL to its group, now."""
        self._stopping = True
        if self._process is not None:
            _signal_group(self._process.pid, signal.SIGKILL)

    def last_lines(self) -> list[str]:
        """The end of its log, without what it held before this supervisor."""
        return [_readable(line) for line in self._log_lines()[-LAST_LINES:]]

    def last_error(self) -> str:
        """The error that its last log line tells, as `Type: words`; empty where it tells none."""
        entry = _entry((self._log_lines() or [""])[-1])
        return str(entry.get("error", ""))

    def _log_lines(self) -> list[str]:
        try:
            with Path(self.spec.log_file).open("rb") as file:
                file.seek(self._log_begins)
                text = file.read().decode("utf-8", "replace")
        except OSError:
            return []
        return text.splitlines()

    async def _run_once(self) -> int:
        spec = self.spec
        Path(spec.log_file).parent.mkdir(parents=True, exist_ok=True)
        with Path(spec.log_file).open("ab") as sink:  # noqa: ASYNC230 - one open per start of a process
            process = await anyio.open_process(
                list(spec.argv),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE if spec.waits_for_ready else sink,
                stderr=sink,
                env={
                    **os.environ,
                    "HEADRACE_PARENT_PID": str(os.getpid()),
                    "PYTHONUNBUFFERED": "1",
                    PROGRESS_ENV: spec.progress_file,
                    **spec.env,
                },
                start_new_session=True,
            )
            self._process = process
            if self._stopping:  # told while it was being started
                _signal_group(process.pid, signal.SIGKILL)
            try:
                if process.stdout is None:
                    self.ready.set()
                    return await process.wait()
                await self._wait_ready(process, process.stdout)
                return await self._wait_forwarding(process, process.stdout, sink)
            finally:
                with anyio.CancelScope(shield=True):
                    _signal_group(process.pid, signal.SIGKILL)
                    await process.aclose()

    async def _wait_forwarding(
        self, process: anyio.abc.Process, stdout: anyio.abc.ByteReceiveStream, sink: BinaryIO
    ) -> int:
        """Copy its output to the log until it ends. Its children may hold the pipe open for longer: nobody waits for them."""
        async with anyio.create_task_group() as tasks:

            async def forward() -> None:
                async for chunk in stdout:
                    sink.write(chunk)
                    sink.flush()

            tasks.start_soon(forward)
            await process.wait()
            tasks.cancel_scope.cancel()
        return await process.wait()

    async def _wait_ready(self, process: anyio.abc.Process, stdout: anyio.abc.ByteReceiveStream) -> None:
        line = b""
        with anyio.move_on_after(self.spec.ready_deadline_s) as scope:
            while b"\n" not in line:
                try:
                    line += await stdout.receive()
                except anyio.EndOfStream:
                    return
        if scope.cancelled_caught:
            _signal_group(process.pid, signal.SIGKILL)
            raise ProcessGivenUpError(
                f"{self.spec.name} was not ready within {self.spec.ready_deadline_s:g} s\n"
                + "\n".join(self.last_lines())
            )
        if self._on_ready is not None:
            self._on_ready(line.split(b"\n", 1)[0].decode("utf-8", errors="replace"))
        self.ready.set()

    def _progress(self) -> int:
        """What changes with each sign of progress."""
        return changed_at(self.spec.progress_file)

    def _was_fruitful(self, started_s: float, stood: int) -> bool:
        """Whether the process that has just ended did anything: then what ended it is no error of every start."""
        policy = self.spec.restart
        enough_s = policy.settled_s if self.spec.progress_file else policy.window_s
        return self._progress() != stood or self._now() - started_s >= enough_s

    def _obituary(self, code: int, deaths: int, when: str = "") -> str:
        lines = "\n  ".join(self.last_lines()) or "(no output)"
        end = f"({_exit_text(code)})"
        if deaths > 1:
            end = f"{deaths} times {when} (last: {_exit_text(code)})"
        return f"{self.spec.name} ended {end}. Its last lines:\n  {lines}"


def python(*arguments: str) -> list[str]:
    """The command line that runs a module of this installation."""
    return [sys.executable, *arguments]


def _readable(line: str) -> str:
    """A JSON log line as a person reads it, without its traceback; other lines as they are."""
    entry = _entry(line)
    if not entry:
        return line
    event, level = entry.get("event", ""), entry.get("level", "")
    return " ".join(str(part) for part in (level, event, entry.get("error", "")) if part)


def _entry(line: str) -> dict[str, object]:
    """A JSON log line; empty: another one."""
    try:
        return msgspec.json.decode(line, type=dict[str, object])
    except msgspec.DecodeError:
        return {}


def _exit_text(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


def _signal_group(pid: int, number: signal.Signals) -> None:
    try:
        os.killpg(pid, number)
    except (ProcessLookupError, PermissionError):
        return
