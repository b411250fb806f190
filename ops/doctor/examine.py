"""Everything that `headrace doctor` looks at, in order. Starts no part of a run."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Final

import anyio.to_thread
import msgspec

from ops.arena_access import LOCAL
from ops.config import RunConfig, load_config, run_streams
from ops.doctor.checks import (
    Finding,
    check_credentials,
    check_machine,
    check_nats_server,
    check_packages,
    check_ports,
    check_python,
    check_servers,
    check_torch,
    error,
    note,
    ok,
)
from ops.doctor.cluster import chosen_node, look_at_cluster
from ops.doctor.engines import check_engines
from ops.doctor.facts import CredentialFacts, PortFacts
from ops.doctor.probe import (
    is_open_to_others,
    probe_gpus,
    probe_holder,
    probe_machine,
    probe_nats_server,
    probe_packages,
    probe_port,
    probe_torch,
)
from ops.doctor.servers import probe_servers
from ops.doctor.topology import check_topology
from ops.extras import needed_extras, needs_torch
from ops.local_arena import local_arena_config
from ops.nodes.file import Cluster, is_topology, load_cluster, node_config
from ops.run_folder import RunFolder, RunFolderError
from ops.running.source import find_source
from schemas.config import BrokerSection
from schemas.errors import ConfigError

_CREDENTIAL_FILES: Final = ("password_file", "token_file", "creds_file", "nkey_seed_file", "tls_key_file")
_PUBLIC_FILES: Final = ("tls_ca_file", "tls_cert_file")


async def examine(
    path: str | None, overrides: Sequence[str] = (), environ: Mapping[str, str] = os.environ, *, node: str = ""
) -> list[Finding]:
    """Look at machine and installation and, with a config or a topology, at everything that it needs.

    Args:
        node: of a topology: the one that this machine is.

    Raises:
        ConfigError: the topology has no such node.
    """
    if path is None:
        return await _examine(None, "", environ, needs_nats=True)
    fix = f"mend {path}, or give another value with --set"
    if is_topology(path):
        try:
            cluster = load_cluster(path, overrides=overrides)
        except ConfigError as wrong:
            return [*await _examine(None, "", environ, needs_nats=True), error("topology", str(wrong), fix)]
        return await _examine_cluster(cluster, environ, node)
    try:
        config = load_config(path, overrides)
    except ConfigError as wrong:
        return [error("config", str(wrong), fix), *await _examine(None, "", environ, needs_nats=True)]
    return await _examine(config, path, environ, needs_nats=config.broker.url == "embedded")


async def _examine_cluster(cluster: Cluster, environ: Mapping[str, str], name: str) -> list[Finding]:
    """The topology, then the node of it that this machine is, with the servers that it has not started yet left out."""
    found, here = await look_at_cluster(cluster, environ)
    node = chosen_node(cluster, here, name)
    if node is None:
        return [*await _examine(None, "", environ, needs_nats=False), *found]
    config = node_config(cluster, node)
    broker = config.broker
    if cluster.brokers:  # theirs are looked at by the topology's checks
        broker = BrokerSection(url="embedded", server_binary=broker.server_binary)
    config = msgspec.structs.replace(config, broker=broker)
    own = await _examine(config, str(cluster.path), environ, needs_nats=node.broker, looks_at_ports=False)
    return [*own, *found]


async def _examine(
    config: RunConfig | None,
    path: str,
    environ: Mapping[str, str],
    *,
    needs_nats: bool,
    looks_at_ports: bool = True,
) -> list[Finding]:
    findings: list[Finding] = []
    machine = await anyio.to_thread.run_sync(probe_machine, Path(config.run.dir if config else "."))
    least = (config or RunConfig()).run.min_free_disk_bytes
    findings += check_machine(machine, least_disk_bytes=least)
    findings.append(check_python(sys.version_info[:3]))
    findings += _packages(config)
    if needs_nats:
        binary = config.broker.server_binary if config else ""
        findings.append(check_nats_server(*await anyio.to_thread.run_sync(probe_nats_server, binary)))
    findings += await _torch(config)
    if config is not None:
        findings += _config(config)
        if looks_at_ports:
            findings += _ports(config)
        findings += check_credentials(list(_credentials(config, environ)))
        findings += check_engines(
            config,
            gpus=await anyio.to_thread.run_sync(probe_gpus),
            available_bytes=machine.available_bytes,
            environ=environ,
        )
        findings += check_servers(await probe_servers(config))
        findings += await check_topology(config)
        if config.arena.url != LOCAL:
            findings.append(note("arena", "its streams are not asked here", f"headrace preflight {path}"))
    return findings


def _packages(config: RunConfig | None) -> list[Finding]:
    try:
        packages = probe_packages()
    except metadata.PackageNotFoundError:
        return [error("packages", "headrace is not installed in this Python", "pip install -e . in its folder")]
    return check_packages(packages, wanted_extras=needed_extras(config) if config is not None else ())


async def _torch(config: RunConfig | None) -> list[Finding]:
    if config is not None and not needs_torch(config):
        return [ok("torch", "not needed by this config")]
    trains = config is not None and config.training.backend != "standin"
    facts = await anyio.to_thread.run_sync(probe_torch, msgspec.json.encode(config) if trains else b"")
    gpus = await anyio.to_thread.run_sync(probe_gpus)
    backend = config.training.backend if config else ""
    findings = check_torch(facts, needed=config is not None, gpus=gpus, backend=backend)
    if facts.config_error:
        fix = "mend the config, or give another value with --set"
        findings.append(error("config training", facts.config_error, fix))
    return findings


def _config(config: RunConfig) -> list[Finding]:
    """What the file's own checks can't say without looking further."""
    streams = ", ".join(run_streams(config))
    findings = [ok("config", f"run {config.run.id!r} in {config.run.dir}; streams {streams}")]
    fix = "mend the config, or give another value with --set"
    if config.arena.url == LOCAL and not config.run.from_run:
        try:
            local_arena_config(config)
        except ConfigError as wrong:
            findings.append(error("config local_arena", str(wrong), fix))
    if config.run.from_run:
        try:
            find_source(config)
        except (ConfigError, RunFolderError) as wrong:
            findings.append(error("config run.from_run", str(wrong), fix))
    if config.policy.folder and not (Path(config.policy.folder) / "config.json").is_file():
        found = f"{config.policy.folder}: expected a model's folder with config.json, found none"
        findings.append(error("config policy.folder", found, "set policy.folder to a Hugging Face model's folder"))
    return findings


def _ports(config: RunConfig) -> list[Finding]:
    wanted = [("gateway.port", config.gateway.host, config.gateway.port)]
    if config.broker.url == "embedded":
        wanted.append(("broker.server_port", "127.0.0.1", config.broker.server_port))
    if config.arena.url == LOCAL and not config.run.from_run:
        try:
            served = local_arena_config(config)
            wanted.append(("local_arena.port", served.host, served.port))
        except ConfigError:
            pass  # told by _config
    wanted += [("engine.ports", config.engine.host, port) for port in config.engine.ports]
    ports: list[PortFacts] = [probe_port(*port) for port in wanted if port[2]]
    if not ports:
        return [ok("ports", "all are chosen when the run starts")]
    return check_ports(ports, run_holder=probe_holder(RunFolder(config.run.dir).path / "run.lock"))


def _credentials(config: RunConfig, environ: Mapping[str, str]) -> Iterator[CredentialFacts]:
    broker = config.broker
    for name in _CREDENTIAL_FILES + _PUBLIC_FILES:
        place = str(getattr(broker, name))
        if place:
            file = Path(place)
            there = file.is_file() and file.stat().st_size > 0
            secret = name in _CREDENTIAL_FILES
            others = there and secret and is_open_to_others(file)
            yield CredentialFacts(key=f"broker.{name}", place=place, present=there, open_to_others=others)
    if config.arena.url != LOCAL:
        for key, name in (
            ("arena.token_env", config.arena.token_env),
            ("arena.llm_api_key_env", config.arena.llm_api_key_env),
        ):
            yield CredentialFacts(key=key, place=name, present=bool(environ.get(name)))
