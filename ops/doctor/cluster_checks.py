"""What the facts about a topology mean: one finding a fact, each with a way out. Pure but for the look at a folder."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from ops.doctor.checks import Finding, check_credentials, error, note, ok, warning
from ops.doctor.facts import CredentialFacts
from ops.nodes.file import Cluster, NodeSection, rank_group
from ops.topology import limits_of
from schemas.config import EngineKind

_GIB = 1024**3


class AddressFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A node's address, as this machine sees it."""

    node: str
    address: str
    resolved: tuple[str, ...] = ()
    is_local: bool = False
    """A server could listen there on this machine."""
    port: int = 0
    """Of the NATS server of a node elsewhere."""
    is_reached: bool = False
    """Something listens at it."""
    error: str = ""
    """Why it does not resolve."""


class CertificateFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What a node's server would show, and what a client would say of it."""

    node: str
    file: str
    error: str = ""


def check_counts(cluster: Cluster) -> list[Finding]:
    """Who runs what."""
    nodes = cluster.file.nodes
    shares = {
        "control": [node.name for node in nodes if node.control],
        "NATS server": [node.name for node in nodes if node.broker],
        "trainer": [f"{node.name}{_ranks(cluster, node)}" for node in nodes if node.trainer],
    }
    for share in ("fan_out", "launchers", "rewards", "gateways", "engines"):
        shares[share] = [f"{node.name} {count}" for node in nodes if (count := getattr(node, share))]
    told = "; ".join(f"{share}: {', '.join(names)}" for share, names in shares.items() if names)
    findings = [ok("nodes", f"{len(nodes)}: {told}")]
    idle = [node.name for node in nodes if not _has_share(node)]
    findings += [
        warning(f"node {name}", "it runs nothing", f"give it a share, or take {name} out of the topology")
        for name in idle
    ]
    return findings


def _has_share(node: NodeSection) -> bool:
    counts = (node.fan_out, node.launchers, node.rewards, node.gateways, node.engines)
    return node.control or node.broker or node.arena or node.trainer or any(counts)


def _ranks(cluster: Cluster, node: NodeSection) -> str:
    group = rank_group(cluster, node)
    count = cluster.config.training.ranks if group is None else group.num_ranks
    return f" {count} ranks" if count > 1 else ""


def check_addresses(addresses: Sequence[AddressFacts]) -> list[Finding]:
    """Whether each resolves, can be listened at where it is this machine's, and means the same on all."""
    findings: list[Finding] = []
    loopback = [facts.node for facts in addresses if facts.resolved and all(map(_is_loopback, facts.resolved))]
    for facts in addresses:
        name = f"address {facts.node}"
        if facts.error:
            fix = "give the node's IP address, or make the name known (DNS, /etc/hosts), the same on all machines"
            findings.append(error(name, f"{facts.address} does not resolve: {facts.error}", fix))
        elif facts.node in loopback and len(loopback) < len(addresses):
            fix = "give the address at which the other machines reach it"
            findings.append(error(name, f"{facts.address} is this machine's own for each machine", fix))
        elif facts.is_local:
            findings.append(ok(name, f"{facts.address}: this machine"))
        elif facts.port and not facts.is_reached:
            found = f"{facts.address}: another machine; nothing answers at its NATS port {facts.port} yet"
            findings.append(note(name, found, "start that node, or open the port"))
        else:
            findings.append(ok(name, f"{facts.address}: another machine"))
    if not any(facts.is_local for facts in addresses):
        fix = "run this on a machine of the topology; only what all machines see alike was looked at"
        findings.append(note("this machine", "none of the nodes by its addresses", fix))
    return findings


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def fixed_ports(cluster: Cluster, node: NodeSection) -> Iterator[tuple[str, int]]:
    """Where they are set, and the ports that are fixed for a node's servers."""
    plan, config = cluster.file.broker, cluster.config
    if node.broker:
        yield "[broker] port", plan.port
        if len(cluster.brokers) > 1:
            yield "[broker] cluster_port", plan.cluster_port
    group = rank_group(cluster, node)
    if group is not None and group.leads and group.port:
        yield "[trainer] port", group.port
    if node.gateways and config.gateway.port:
        yield "gateway.port", config.gateway.port
    for port in config.engine.ports[: node.engines]:
        yield "engine.ports", port


def twice_taken(cluster: Cluster) -> list[Finding]:
    """Ports that two servers at one address would want."""
    takers: dict[tuple[str, int], list[str]] = {}
    for node in cluster.file.nodes:
        for key, port in fixed_ports(cluster, node):
            takers.setdefault((node.address, port), []).append(f"{key} of {node.name}")
    return [
        error(f"port {port}", f"{address}:{port} is wanted by {' and '.join(keys)}", "give each a port of its own")
        for (address, port), keys in takers.items()
        if len(keys) > 1
    ]


def check_replicas(cluster: Cluster) -> list[Finding]:
    """Whether as many servers are there as streams want copies, and what their loss means."""
    brokers, replicas = cluster.brokers, cluster.config.broker.replicas
    if not brokers:
        return [ok("replicas", f"{replicas}, on servers that the topology does not run")]
    if replicas > len(brokers):
        fix = f"set broker.replicas = {min(len(brokers), 3)}, or broker = true on {replicas} nodes"
        return [error("replicas", f"broker.replicas = {replicas} with {len(brokers)} NATS servers", fix)]
    if len(brokers) == 1:
        fix = "broker = true on three nodes keeps a run going without one of them"
        return [note("replicas", f"1: the run stands while node {brokers[0].name} is away, and loses nothing", fix)]
    machines = {node.address for node in brokers}
    if len(machines) < len(brokers):
        fix = "give each NATS server a machine of its own"
        return [warning("replicas", f"{replicas} copies on {len(machines)} addresses of {len(brokers)} servers", fix)]
    return [ok("replicas", f"{replicas} copies on {len(brokers)} servers: {(len(brokers) - 1) // 2} may be away")]


def check_store(cluster: Cluster) -> list[Finding]:
    """Whether the run's streams fit into a server's limit: else the server refuses to make them."""
    if not cluster.brokers:
        return []
    limits, most = limits_of(cluster.config), cluster.file.broker.max_store_bytes
    wanted = limits.log_max_bytes + limits.payload_max_bytes + limits.state_max_bytes
    found = f"{wanted / _GIB:.2f} GiB for the run's streams of {most / _GIB:.2f} GiB ([broker] max_store_bytes)"
    if wanted > most:
        fix = "raise max_store_bytes, or lower broker.max_bytes and broker.max_payload_store_bytes"
        return [error("store", f"{found}: the server will refuse them", fix)]
    return [ok("store", found)]


def check_gpus(cluster: Cluster) -> list[Finding]:
    """Whether what a node's trainer and engines take is what it is given."""
    findings: list[Finding] = []
    engine = cluster.config.engine
    for node in cluster.file.nodes:
        group = rank_group(cluster, node)
        ranks = 0 if not node.trainer else cluster.config.training.ranks if group is None else group.num_ranks
        on_gpu = engine.device == "cuda" and engine.kind in (EngineKind.VLLM, EngineKind.SGLANG)
        engines = node.engines * engine.gpus_per_engine if on_gpu else 0
        if node.gpus and ranks + engines > node.gpus and not engine.time_shared:
            found = f"{ranks} ranks and {engines} GPUs of engines on {node.gpus} GPUs"
            fix = "fewer ranks or engines there, more GPUs, or engine.time_shared = true"
            findings.append(warning(f"gpus {node.name}", found, fix))
    return findings


def check_checkpoints(cluster: Cluster, here: Sequence[NodeSection]) -> list[Finding]:
    """The folder that the ranks of several nodes share, as far as one machine can see it."""
    groups = [group for node in here if (group := rank_group(cluster, node)) is not None]
    if not groups:
        return []
    folder = Path(cluster.config.training.checkpoint_dir).absolute()
    place = folder
    while not place.exists() and place != place.parent:
        place = place.parent
    if not (place.is_dir() and os.access(place, os.W_OK)):
        fix = "mount it, or set training.checkpoint_dir to a folder that all nodes of the trainer share and may write"
        return [error("checkpoints", f"training.checkpoint_dir {folder}: {place} can't be written", fix)]
    found = (
        f"{folder}; that all {len(groups[0].members)} nodes of the trainer see the same one is checked when they meet"
    )
    return [note("checkpoints", found)]


def check_shared_keys(keys: CredentialFacts) -> Finding:
    """The file that every node has a copy of; the control node makes it where it is missing there."""
    if not keys.present:
        fix = f"headrace deploy keys {keys.place}, once; then copy the file to every node (chmod 600)"
        return error("credential secrets", f"{keys.place}: not there, or empty", fix)
    return check_credentials([keys])[0]


def check_certificates(certificates: Sequence[CertificateFacts]) -> list[Finding]:
    """Whether clients will accept what each server shows."""
    return [
        error(
            f"certificate {facts.node}",
            f"{facts.file}: {facts.error}",
            "make one for the node's address, signed by tls_ca_file, for server and client use",
        )
        if facts.error
        else ok(f"certificate {facts.node}", f"{facts.file} fits its key, authority and address")
        for facts in certificates
    ]
