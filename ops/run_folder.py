"""The folder of a run: what lies where, and where its servers are reached."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import msgspec
import psutil

from broker.settings import ConnectSettings
from ops.config import RunConfig


class RunFolderError(Exception):
    """The folder can't be used; the text says why and what to do."""


class Endpoints(msgspec.Struct, frozen=True, kw_only=True):
    """Where the run's servers are. Written by the supervisor; kept, so that a restart finds the same ports."""

    run: str
    node: str = ""
    """The node of a topology whose folder this is; empty: a run on one machine."""
    broker_url: str = ""
    broker_login: ConnectSettings = ConnectSettings()
    """How to log in there: names of files, no secret."""
    arena_url: str = ""
    gateway_port: int = 0
    supervisor_pid: int = 0


class RunFolder:
    """Paths below a run's folder."""

    def __init__(self, path: str | Path) -> None:
        self.path: Final = Path(path).absolute()
        self.config_file: Final = self.path / "config.json"
        self.endpoints_file: Final = self.path / "endpoints.json"
        self.ready_file: Final = self.path / "ready.pid"
        """Written by a node's supervisor once its workers are started; gone when it gives the folder up."""
        self.logs: Final = self.path / "logs"
        self.nats: Final = self.path / "nats"
        self.weights: Final = self.path / "weights"
        self.checkpoints: Final = self.path / "checkpoints"
        self.policy: Final = self.path / "policy"
        self.cache: Final = self.path / "cache"
        self.progress: Final = self.path / "progress"
        """A file of each process that is started again when it dies: touched when it has done something."""

    def create(self) -> None:
        """Make the folder.

        Raises:
            RunFolderError: it can't be written.
        """
        try:
            for folder in (self.path, self.logs, self.weights, self.checkpoints, self.cache, self.progress):
                folder.mkdir(parents=True, exist_ok=True)
            probe = self.path / ".writable"
            probe.write_bytes(b"")
            probe.unlink()
        except OSError as error:
            raise RunFolderError(f"run.dir {self.path}: expected a writable folder, found: {error.strerror}") from error

    @contextmanager
    def lock(self) -> Generator[None]:
        """Hold the folder against a second `headrace run`.

        Raises:
            RunFolderError: another process holds it.
        """
        with (self.path / "run.lock").open("a+", encoding="utf-8") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                file.seek(0)
                raise RunFolderError(
                    f"run.dir {self.path}: it is in use (pid {file.read().strip() or 'unknown'}); "
                    "stop that one, or set run.dir to another folder"
                ) from error
            file.truncate(0)
            file.write(str(os.getpid()))
            file.flush()
            try:
                yield
            finally:
                if self.is_ready(os.getpid()):
                    self.ready_file.unlink(missing_ok=True)

    def holder(self) -> int | None:
        """The process of this machine that holds the folder."""
        try:
            with (self.path / "run.lock").open(encoding="ascii", errors="replace") as file:
                pid = file.read().strip()
                # Only a living holder is asked for its lock: a run that is just starting would find it taken.
                if not pid.isdecimal() or not psutil.pid_exists(int(pid)):
                    return None
                try:
                    fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                except OSError:
                    return int(pid)
        except OSError:
            return None
        return None

    def say_ready(self) -> None:
        """This process has started its workers."""
        _write(self.ready_file, str(os.getpid()).encode())

    def is_ready(self, pid: int) -> bool:
        """Whether a supervisor has started its workers."""
        try:
            return self.ready_file.read_bytes() == str(pid).encode()
        except OSError:
            return False

    def write_config(self, config: RunConfig) -> bytes:
        """Keep the effective config for the workers, for its owner only: it holds the harnesses' environments; its bytes."""
        data = msgspec.json.format(msgspec.json.encode(config), indent=2)
        write_private(self.config_file, data)
        return data

    def read_config(self) -> RunConfig:
        """The config that the supervisor wrote.

        Raises:
            RunFolderError: there is none.
        """
        return msgspec.json.decode(self._read(self.config_file), type=RunConfig)

    def write_endpoints(self, endpoints: Endpoints) -> None:
        """Say where the servers are."""
        _write(self.endpoints_file, msgspec.json.encode(endpoints))

    def read_endpoints(self) -> Endpoints:
        """Where the servers are.

        Raises:
            RunFolderError: the run was never started.
        """
        return msgspec.json.decode(self._read(self.endpoints_file), type=Endpoints)

    def _read(self, path: Path) -> bytes:
        try:
            return path.read_bytes()
        except OSError as error:
            raise RunFolderError(
                f"{path}: expected the folder of a run that was started, found: {error.strerror}"
            ) from error


def write_private(path: Path, data: bytes) -> None:
    """Write a whole file that only its owner may read (mode 0600), whatever stood there."""
    part = _part(path)
    part.unlink(missing_ok=True)
    with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(data)
    part.replace(path)


def _write(path: Path, data: bytes) -> None:
    part = _part(path)
    part.write_bytes(data)
    part.replace(path)


def _part(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}")
