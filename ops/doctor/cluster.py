"""`headrace doctor TOPOLOGY.toml`: what is seen of a topology from this machine. Looks and asks; starts nothing."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import anyio
import anyio.to_thread
import msgspec

from ops.doctor.certificates import probe_certificate
from ops.doctor.checks import Finding, check_credentials, check_ports
from ops.doctor.cluster_checks import (
    AddressFacts,
    check_addresses,
    check_certificates,
    check_checkpoints,
    check_counts,
    check_gpus,
    check_replicas,
    check_shared_keys,
    check_store,
    fixed_ports,
    twice_taken,
)
from ops.doctor.facts import CredentialFacts, PortFacts
from ops.doctor.probe import is_open_to_others, probe_holder, probe_port
from ops.nodes.file import Cluster, NodeSection, node_config, this_node
from ops.run_folder import RunFolder
from schemas.errors import ConfigError

_REACH_S: Final = 2.0


async def look_at_cluster(cluster: Cluster, environ: Mapping[str, str]) -> tuple[list[Finding], list[NodeSection]]:
    """All findings that no single node's config can give, and the nodes that are or can be this machine."""
    addresses = await _addresses(cluster)
    local = {facts.node for facts in addresses if facts.is_local}
    here = [node for node in cluster.file.nodes if node.name in local]
    findings = check_counts(cluster)
    findings += check_addresses(addresses)
    findings += twice_taken(cluster)
    for node in here:
        findings += await anyio.to_thread.run_sync(_ports, cluster, node)
    findings += check_replicas(cluster)
    findings += check_store(cluster)
    findings += check_gpus(cluster)
    findings += await anyio.to_thread.run_sync(check_checkpoints, cluster, here)
    if cluster.secrets_file.is_file() or any(not node.control for node in here):
        findings.append(check_shared_keys(_file("secrets", cluster.secrets_file)))
    findings += check_credentials(list(_credentials(cluster, here, environ)))
    findings += check_certificates(
        [await anyio.to_thread.run_sync(probe_certificate, cluster, node) for node in here if node.broker]
        if cluster.file.broker.tls_cert_file
        else []
    )
    return findings, here


def chosen_node(cluster: Cluster, here: list[NodeSection], name: str = "") -> NodeSection | None:
    """The node that this machine is: the named one, the only one that it can be, or the one by its own addresses.

    Raises:
        ConfigError: there is no node of that name.
    """
    if name:
        return cluster.node(name)
    if len(here) == 1:
        return here[0]
    try:
        return this_node(cluster)
    except ConfigError:  # all nodes are this machine, or none is
        return here[0] if here else None


async def _addresses(cluster: Cluster) -> list[AddressFacts]:
    """All of them at once."""
    found: dict[str, AddressFacts] = {}
    async with anyio.create_task_group() as tasks:

        async def look(node: NodeSection) -> None:
            facts = await anyio.to_thread.run_sync(_address, node)
            port = cluster.file.broker.port if node.broker else 0
            if port and facts.resolved and not facts.is_local:
                facts = msgspec.structs.replace(facts, port=port, is_reached=await _reaches(node.address, port))
            found[node.name] = facts

        for node in cluster.file.nodes:
            tasks.start_soon(look, node)
    return [found[node.name] for node in cluster.file.nodes]


def _address(node: NodeSection) -> AddressFacts:
    try:
        places = socket.getaddrinfo(node.address, 0, type=socket.SOCK_STREAM)
    except OSError as error:
        return AddressFacts(node=node.name, address=node.address, error=error.strerror or str(error))
    is_local = not probe_port("nodes.address", str(places[0][4][0]), 0).error
    resolved = tuple(sorted({str(place[4][0]) for place in places}))
    return AddressFacts(node=node.name, address=node.address, resolved=resolved, is_local=is_local)


async def _reaches(host: str, port: int) -> bool:
    with anyio.move_on_after(_REACH_S):
        try:
            await (await anyio.connect_tcp(host, port)).aclose()
        except OSError:
            return False
        return True
    return False


def _ports(cluster: Cluster, node: NodeSection) -> list[Finding]:
    """Whether the ports that are fixed for a node of this machine are free."""
    facts: list[PortFacts] = []
    for key, port in fixed_ports(cluster, node):
        found = probe_port(key, node.address, port)
        facts.append(msgspec.structs.replace(found, key=f"{key} of {node.name}"))
    holder = probe_holder(RunFolder(cluster.run_dir(node.name)).path / "run.lock")
    return check_ports(facts, run_holder=holder)


def _credentials(cluster: Cluster, here: list[NodeSection], environ: Mapping[str, str]) -> Iterator[CredentialFacts]:
    """What each node of this machine logs in with; never a value."""
    for node in here:
        broker = node_config(cluster, node).broker
        for name in ("password_file", "token_file", "creds_file", "nkey_seed_file", "tls_key_file"):
            place = str(getattr(broker, name))
            if place:
                yield _file(f"broker.{name} of {node.name}", Path(place))
        if node.broker and cluster.file.broker.tls_key_file:
            key = cluster.broker_file(cluster.file.broker.tls_key_file, node.name)
            yield _file(f"[broker] tls_key_file of {node.name}", Path(key))
    engine = cluster.config.engine
    if engine.api_key_env and any(node.engines or node.gateways for node in here):
        yield CredentialFacts(
            key="engine.api_key_env", place=engine.api_key_env, present=bool(environ.get(engine.api_key_env))
        )


def _file(key: str, file: Path) -> CredentialFacts:
    there = file.is_file() and os.access(file, os.R_OK) and file.stat().st_size > 0
    return CredentialFacts(key=key, place=str(file), present=there, open_to_others=there and is_open_to_others(file))
