"""Looks at machine and installation. Reads and asks; the one thing it writes is a file of a moment, to see the disk's clock."""

from __future__ import annotations

import ctypes
import fcntl
import os
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path
from typing import Final

import msgspec
import psutil
from packaging.requirements import Requirement

from broker.embedded import find_binary
from broker.errors import ServerStartError
from ops.doctor.facts import MachineFacts, PackageFacts, PortFacts, TorchFacts

_DEADLINE_S: Final = 10.0
_TORCH_DEADLINE_S: Final = 90.0
_DEVELOPMENT: Final = ("dev",)
_TIME_ERROR: Final = 5
_TIMEX_BYTES: Final = 512


def probe_machine(folder: Path) -> MachineFacts:
    """The machine, and the disk that a folder is or will be on."""
    place = folder.absolute()
    while not place.is_dir() and place != place.parent:
        place = place.parent
    memory = psutil.virtual_memory()
    limit, used = _container_memory()
    writable, offset_s = _file_clock(place)
    return MachineFacts(
        num_cores=_cores(),
        memory_bytes=min(memory.total, limit or memory.total),
        available_bytes=min(memory.available, max(0, limit - used) if limit else memory.available),
        place=str(place),
        writable=writable,
        free_disk_bytes=shutil.disk_usage(place).free,
        max_open_files=_open_files(),
        unix_time_s=time.time(),
        file_time_offset_s=offset_s,
        clock_synchronized=_synchronized(),
    )


def _cores() -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota, _, period = _words("/sys/fs/cgroup/cpu.max").partition(" ")
    if quota.isdecimal() and period.isdecimal():
        cores = min(cores, max(1, int(quota) // int(period)))
    return cores


def _container_memory() -> tuple[int, int]:
    """Limit and use of this container; a limit of 0: none."""
    limit, used = _words("/sys/fs/cgroup/memory.max"), _words("/sys/fs/cgroup/memory.current")
    return (int(limit), int(used)) if limit.isdecimal() and used.isdecimal() else (0, 0)


def _words(path: str) -> str:
    try:
        return Path(path).read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return ""


def _file_clock(place: Path) -> tuple[bool, float]:
    try:
        with tempfile.NamedTemporaryFile(dir=place, prefix=".headrace-doctor-") as file:
            file.write(b"x")
            file.flush()
            return True, os.fstat(file.fileno()).st_mtime - time.time()
    except OSError:
        return False, 0.0


def _open_files() -> int:
    if sys.platform == "win32":
        return 2**31
    import resource  # noqa: PLC0415 - not on every platform

    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return 2**31 if soft == resource.RLIM_INFINITY else soft


def _synchronized() -> bool | None:
    """What the Linux kernel thinks of its clock (adjtimex with nothing to adjust)."""
    if sys.platform != "linux":
        return None
    state = ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.create_string_buffer(_TIMEX_BYTES))
    return None if state < 0 else state != _TIME_ERROR


def probe_packages() -> list[PackageFacts]:
    """Every requirement of the installed headrace, but those of its development.

    Raises:
        PackageNotFoundError: headrace runs from a folder and was never installed.
    """
    found: dict[tuple[str, str], PackageFacts] = {}
    for text in metadata.requires("headrace") or []:
        requirement = Requirement(text)
        for extra in ("", *_extras(requirement)):
            if extra in _DEVELOPMENT or (requirement.marker and not requirement.marker.evaluate({"extra": extra})):
                continue
            try:
                version = metadata.version(requirement.name)
            except metadata.PackageNotFoundError:
                version = ""
            found.setdefault(
                (extra, requirement.name),
                PackageFacts(
                    name=requirement.name,
                    needed=str(requirement.specifier),
                    found=version,
                    fits=bool(version) and requirement.specifier.contains(version, prereleases=True),
                    extra=extra,
                ),
            )
            break
    return list(found.values())


def _extras(requirement: Requirement) -> list[str]:
    if requirement.marker is None:
        return []
    names = metadata.metadata("headrace").get_all("Provides-Extra") or []
    return [name for name in names if requirement.marker.evaluate({"extra": name})]


def probe_nats_server(setting: str) -> tuple[str, str, str]:
    """Path, version, problem of the nats-server binary."""
    try:
        path = find_binary(setting)
        said = _said([str(path), "--version"])
    except (ServerStartError, OSError, subprocess.SubprocessError) as error:
        return "", "", str(error)
    version = said.split()[-1].removeprefix("v") if said.split() else ""
    return str(path), version, ""


def probe_gpus() -> list[str]:
    """GPUs that the NVIDIA driver lists; none where there is no driver."""
    if shutil.which("nvidia-smi") is None:
        return []
    try:
        said = _said(["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"])
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in said.splitlines() if line.strip()]


def _said(argv: list[str]) -> str:
    done = subprocess.run(argv, capture_output=True, timeout=_DEADLINE_S, check=True)  # noqa: S603 - fixed commands
    return done.stdout.decode("utf-8", "replace").strip()


def probe_torch(config_json: bytes = b"") -> TorchFacts:
    """Ask a process of its own: this one stays without torch, and a broken build can't take it down."""
    try:
        metadata.version("torch")
    except metadata.PackageNotFoundError:
        return TorchFacts()
    try:
        done = subprocess.run(
            [sys.executable, "-m", "ops.doctor.torch_process"],
            input=config_json,
            capture_output=True,
            timeout=_TORCH_DEADLINE_S,
            check=False,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        )
    except subprocess.TimeoutExpired:
        return TorchFacts(error=f"it was not imported within {_TORCH_DEADLINE_S:.0f} s")
    try:
        return msgspec.json.decode(done.stdout.splitlines()[-1], type=TorchFacts)
    except (IndexError, msgspec.DecodeError):
        words = done.stderr.decode("utf-8", "replace").strip().splitlines() or ["no message"]
        return TorchFacts(error=f"it can't be imported: {words[-1]}")


def probe_port(key: str, host: str, port: int) -> PortFacts:
    """Whether a port can be bound."""
    found = ""
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except OSError as error:
        found = error.strerror or str(error)
    return PortFacts(key=key, host=host, port=port, error=found)


def is_open_to_others(file: Path) -> bool:
    """Whether other users may read a file."""
    return bool(file.stat().st_mode & (stat.S_IRGRP | stat.S_IROTH))


def probe_holder(lock: Path) -> str:
    """The process that holds a run's folder; empty where nobody does."""
    try:
        with lock.open(encoding="ascii") as file:
            pid = file.read().strip()
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except OSError:
                return pid or "unknown"
    except OSError:
        return ""
    return ""
