"""Whether the servers that a config wants can be started on this machine, or are there."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from ops.config import RunConfig
from ops.doctor.checks import Finding, error, note, ok, warning
from ops.engines.plan import gpus_of, has_servers, num_started, server_environment
from schemas.config import EngineKind
from schemas.errors import ConfigError

_MEMORY_BYTES = 3 * 1024**3
"""Resident memory of a started server on CPU with a tiny policy."""


def check_engines(
    config: RunConfig, *, gpus: Sequence[str], available_bytes: int, environ: Mapping[str, str] = os.environ
) -> list[Finding]:
    """What `[engine]` needs.

    Args:
        gpus: what the driver lists.
        available_bytes: memory of this machine that is free.
    """
    section = config.engine
    if not has_servers(section):
        return [ok("engine", f"{section.kind.value}, in the gateway's process")]
    findings: list[Finding] = []
    if section.api_key_env and not environ.get(section.api_key_env):
        fix = f"export {section.api_key_env}=…"
        findings.append(error("engine key", f"{section.api_key_env}: not there, or empty", fix))
    started = num_started(section)
    if started:
        findings.append(_command(config, started))
        findings += _places(config, started, gpus, available_bytes)
    elif not section.urls:
        findings.append(
            note(
                "engine",
                "no server is started or named: calls wait for one",
                "headrace engine register URL, or set engine.count",
            )
        )
    return findings


def _command(config: RunConfig, started: int) -> Finding:
    section = config.engine
    if section.command:
        program = section.command[0]
        if shutil.which(program) is None:
            return error("engine command", f"{program}: nothing to run there", "mend engine.command, or its PATH")
        return ok("engine", f"{started} × {section.kind.value}, started with {' '.join(section.command)}")
    try:
        environment = server_environment(section)
    except ConfigError as wrong:
        fix = "python -m ops.engines.cpu_environment, or set engine.python to an interpreter that has the server"
        return error("engine environment", str(wrong), fix)
    package = "vllm" if section.kind is EngineKind.VLLM else "sglang"
    if not any(Path(environment.python).parent.parent.glob(f"lib/python3*/site-packages/{package}")):
        return warning(
            "engine environment",
            f"{package} is not among the packages of {environment.python}",
            f"install {package} there, or set engine.python",
        )
    return ok("engine", f"{started} × {section.kind.value} on {section.device}, started with {environment.python}")


def _places(config: RunConfig, started: int, gpus: Sequence[str], available_bytes: int) -> list[Finding]:
    section = config.engine
    if section.device == "cuda":
        if not gpus:
            return [
                error(
                    "engine gpus",
                    "engine.device = cuda, and the driver lists no GPU",
                    "nvidia-smi; or engine.device = cpu",
                )
            ]
        named = [gpu for slot in range(started) for gpu in gpus_of(section, slot)]
        if len(named) > len(gpus):
            return [error("engine gpus", f"{len(named)} are named, the driver lists {len(gpus)}", "mend engine.gpus")]
        return [ok("engine gpus", ", ".join(named) if named else "as the server chooses")]
    needed = started * _MEMORY_BYTES
    if available_bytes < needed:
        found = f"{available_bytes / 2**30:.1f} GiB available, {started} servers on CPU need about {needed / 2**30:.0f}"
        return [warning("engine memory", found, "lower engine.count")]
    return []
