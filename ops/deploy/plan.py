"""What all rendered deployments have in common: places of files, who logs in at the broker, the topology as nodes find it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from broker.rights import Permissions, Role, inbox_prefix, permissions
from ops.nodes.file import Cluster, NodeSection
from ops.topology import ARENA_LAUNCH, FAN_OUT, REWARDS
from schemas.errors import ConfigError
from schemas.topics import TOPICS

USERS: Final = (Role.OPERATOR, Role.ROLLOUT, Role.READER)
"""Who may log in at rendered NATS servers: control and trainer nodes as operator, the others as rollout, people who only look
as reader."""
_ROLLOUT_TOPICS: Final = ("episode.", "session.", "interaction.", "trajectory.", "weights.loaded", "dead.letter")


class Places(msgspec.Struct, frozen=True, kw_only=True):
    """Where things are on the machines that run the files."""

    headrace: str = "/opt/headrace/bin/headrace"
    nats_server: str = "/usr/local/bin/nats-server"
    etc: str = "/etc/headrace"
    """Topology, config, certificates, passwords."""
    state: str = "/var/lib/headrace"
    """Run folders, the NATS store, the keys that all nodes share."""
    image: str = "headrace:latest"
    """Kubernetes: an image with headrace and, for nodes with GPUs, the extra `train`."""
    nats_image: str = "nats:2.12-alpine"


def role_of(node: NodeSection) -> Role:
    """As what a node logs in."""
    return Role.OPERATOR if node.control or node.trainer else Role.ROLLOUT


def user_permissions(role: Role, run: str) -> Permissions:
    """What a user of a rendered NATS server may do."""
    if role is not Role.ROLLOUT:
        return permissions(role, run, role.value)
    topics = [topic.name for topic in TOPICS if topic.name.startswith(_ROLLOUT_TOPICS)]
    return permissions(role, run, role.value, topics=topics, durables=[FAN_OUT, ARENA_LAUNCH, REWARDS])


def password_env(run: str, role: Role) -> str:
    """The environment variable of a NATS server that holds a user's password."""
    return f"HEADRACE_{run.upper().replace('-', '_')}_{role.value.upper()}_PASSWORD"


def password_file(places: Places, role: Role) -> str:
    """Where a node finds its user's password."""
    return f"{places.etc}/passwords/{role.value}"


def brokers_of(cluster: Cluster) -> list[NodeSection]:
    """The nodes with a NATS server.

    Raises:
        ConfigError: there are none: the broker is somebody else's.
    """
    if not cluster.brokers:
        raise ConfigError(
            f"{cluster.path}: no node has broker = true ({cluster.config.broker.url} is somebody else's): no NATS server is rendered"
        )
    return cluster.brokers


def node_topology(
    cluster: Cluster, places: Places, urls: str, *, addresses: dict[str, str] | None = None, more: Sequence[str] = ()
) -> str:
    """The topology as the nodes of a rendered deployment have it: NATS servers are no longer theirs, login and TLS are set.

    Args:
        addresses: of nodes, instead of the topology's.
        more: overrides of the config.
    """
    run, role = cluster.config.run.id, Role.OPERATOR
    broker = {
        "url": urls,
        "user": role.value,
        "password_file": password_file(places, role),
        "inbox_prefix": inbox_prefix(role.value),
        "tls_ca_file": f"{places.etc}/tls/ca.crt",
        "replicas": cluster.config.broker.replicas,
    }
    overrides = [
        *(f"broker.{key}={json.dumps(value)}" for key, value in broker.items()),
        f"run.dir={json.dumps(f'{places.state}/{run}')}",
        *more,
    ]
    nodes = [
        msgspec.structs.replace(
            node, broker=False, broker_user=role_of(node).value, address=(addresses or {}).get(node.name, node.address)
        )
        for node in cluster.file.nodes
        if has_work(node)
    ]
    return topology_text(cluster, nodes, overrides, secrets=secrets_file(places))


def topology_text(cluster: Cluster, nodes: Sequence[NodeSection], overrides: Sequence[str], *, secrets: str) -> str:
    """A topology file beside its config, `config.toml`."""
    plan = msgspec.to_builtins(cluster.file.broker)
    lines = [
        "# Rendered by `headrace deploy render`: the same on every node.",
        'config = "config.toml"',
        f"set = {json.dumps([*cluster.file.set, *overrides], indent=2)}",
        f"secrets = {json.dumps(secrets)}",
        "",
        "[broker]",
        *(f"{key} = {json.dumps(value)}" for key, value in plan.items()),
    ]
    if sum(node.trainer for node in nodes) > 1:
        lines += ["", "[trainer]", f"port = {cluster.file.trainer.port}"]
    for node in nodes:
        told = msgspec.to_builtins(node)
        lines += ["", "[[nodes]]", *(f"{key} = {json.dumps(value)}" for key, value in told.items() if value)]
    return "\n".join(lines) + "\n"


def secrets_file(places: Places) -> str:
    """The keys that all nodes share."""
    return f"{places.etc}/secrets.json"


def config_text(cluster: Cluster) -> str:
    """The run's config file as it is."""
    return (cluster.path.parent / cluster.file.config).read_text(encoding="utf-8")


def broker_urls(brokers: list[NodeSection], port: int) -> str:
    """Where clients find the servers."""
    return ",".join(f"tls://{bracketed(node.address)}:{port}" for node in brokers)


def bracketed(address: str) -> str:
    """An address as it stands in a URL."""
    return f"[{address}]" if ":" in address else address


def trainers_of(cluster: Cluster) -> list[NodeSection]:
    """The nodes that share a trainer's ranks; none where one node has all."""
    found = [node for node in cluster.file.nodes if node.trainer]
    return found if len(found) > 1 else []


def has_work(node: NodeSection) -> bool:
    """Whether a node runs anything but a NATS server."""
    counts = (node.fan_out, node.launchers, node.rewards, node.gateways, node.engines)
    return node.control or node.arena or node.trainer or any(counts)


def checked_place(path: str) -> str:
    """A place on the machines that run the files.

    Raises:
        ConfigError: a relative path, or one that files of these formats can't hold.
    """
    if not Path(path).is_absolute() or any(character.isspace() or character in "\"'$\\" for character in path):
        raise ConfigError(f"{path!r}: expected an absolute path without spaces, quotes, '$' and backslashes")
    return path
