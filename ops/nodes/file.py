"""TOPOLOGY.toml: a run's config, and the nodes with their addresses and what each of them runs. Decides only; starts nothing.

config = "my.toml"          the run's config: nothing in it says where anything is

[[nodes]]                   the node that decides: folds, run.started, the end of the run
name = "head"
address = "10.0.0.1"
control = true
broker = true

[[nodes]]                   a node that rolls out
name = "rollout-1"
address = "10.0.0.2"
gateways = 2
launchers = 1
"""

from __future__ import annotations

import os
import socket
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec
import psutil

from broker.rights import inbox_prefix
from ops.arena_access import LOCAL, uses_arena
from ops.config import RunConfig, check_keys, load_config
from ops.engines.plan import has_servers
from schemas.errors import ConfigError
from schemas.ids import is_safe_token

_MOST_BROKERS: Final = (0, 1, 3, 5)
_REPLICAS: Final = 3


class NodeSection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[[nodes]]: one machine, and its share of the run."""

    name: str
    """Letters, digits, '_', '-'."""
    address: str
    """Where the other nodes reach it; its servers listen there."""
    broker: bool = False
    """Runs a NATS server; on three nodes these are one cluster."""
    control: bool = False
    """Samples, assembles, keeps the store within its limits, announces the run and ends it. One node."""
    arena: bool = False
    """Runs the local Arena, where `arena.url` is "local". One node, on a loopback address."""
    trainer: bool = False
    """Runs the trainer with all `training.ranks`, and publishes its weights. One node."""
    fan_out: int = 0
    """Processes that make episodes of groups."""
    launchers: int = 0
    """Processes that launch episodes and wait for their ends."""
    rewards: int = 0
    """Processes that map rewards."""
    gateways: int = 0
    """Processes that agents find the model at; a built-in or scripted engine is in each."""
    engines: int = 0
    """Inference servers that are started (vllm, sglang)."""
    broker_user: str = ""
    """Logs in at the broker as this user instead of the config's: with the password in the file of that name beside
    `broker.password_file`, and an inbox of its own."""
    gpus: int = 0
    """What rendered deployments ask for this node; `engine.gpus` says which of them engines take."""


class BrokerPlan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[broker]: the NATS servers that the nodes run."""

    port: int = 4222
    cluster_port: int = 6222
    max_store_bytes: int = 1024**4
    """What the streams of a server may hold together."""


class TopologyFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A whole TOPOLOGY.toml."""

    config: str
    """The run's config file, relative to this one."""
    set: list[str] = []
    """Overrides of the config, as of `--set`."""
    secrets: str = "secrets.json"
    """Keys that all nodes share, relative to this file; the control node makes it, every other node needs a copy (mode 0600)."""
    broker: BrokerPlan = BrokerPlan()
    nodes: list[NodeSection]


class Cluster(msgspec.Struct, frozen=True, kw_only=True):
    """A topology with its config."""

    path: Path
    file: TopologyFile
    config: RunConfig
    """As every node has it, without what is a node's own."""

    @property
    def brokers(self) -> list[NodeSection]:
        """The nodes with a NATS server."""
        return [node for node in self.file.nodes if node.broker]

    @property
    def secrets_file(self) -> Path:
        """Keys that all nodes share."""
        return self.path.parent / self.file.secrets

    def node(self, name: str) -> NodeSection:
        """One of the nodes.

        Raises:
            ConfigError: there is none of that name.
        """
        for node in self.file.nodes:
            if node.name == name:
                return node
        raise ConfigError(f"{self.path}: expected a node of {_names(self.file.nodes)}, found {name!r}")

    def run_dir(self, node: str) -> str:
        """A node's own run folder: its name below the config's run.dir."""
        return str(Path(self.config.run.dir) / node)


def load_cluster(path: str | Path, *, overrides: Sequence[str] = (), addresses: Mapping[str, str] = {}) -> Cluster:
    """Read a topology and its config, and check them together.

    Args:
        overrides: of the config, after the topology's own.
        addresses: of nodes, instead of the file's: where they are known only when they start.

    Raises:
        ConfigError: the first thing that can't be used.
    """
    place = Path(path)
    try:
        tree = tomllib.loads(place.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: expected a readable topology file, found: {error.strerror}") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from error
    check_keys(tree, TopologyFile, "")
    try:
        file = msgspec.convert(tree, TopologyFile)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path}: {error}") from error
    unknown = sorted(addresses.keys() - {node.name for node in file.nodes})
    if unknown:
        raise ConfigError(f"--address {unknown[0]}=…: expected a node of {_names(file.nodes)}")
    nodes = [msgspec.structs.replace(node, address=addresses.get(node.name, node.address)) for node in file.nodes]
    file = msgspec.structs.replace(file, nodes=nodes)
    config = load_config(place.parent / file.config, [*file.set, *overrides])
    check_topology(file, config)
    return Cluster(path=place, file=file, config=with_broker(file, config))


def check_topology(file: TopologyFile, config: RunConfig) -> None:
    """What no single node can say.

    Raises:
        ConfigError: nodes that contradict each other or the config.
    """
    nodes = file.nodes
    for node in nodes:
        _check_node(node, config)
    names = [node.name for node in nodes]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError(f"nodes: {twice[0]!r} stands there twice; expected names of their own")
    _exactly(nodes, "control", 1)
    trains = not config.run.rollout_only
    _exactly(nodes, "trainer", 1 if trains else 0, "" if trains else " (run.rollout_only trains nothing)")
    local = config.arena.url == LOCAL and not config.run.from_run and uses_arena(config)
    _exactly(
        nodes, "arena", 1 if local else 0, "" if local else " (no stream of the config is played by a local Arena)"
    )
    embedded = config.broker.url == "embedded"
    count = sum(node.broker for node in nodes)
    if count not in _MOST_BROKERS or (count == 0) == embedded:
        wanted = "1, 3 or 5 nodes (broker.url is embedded)" if embedded else f"none: broker.url is {config.broker.url}"
        raise ConfigError(f"nodes: broker = true on {count} nodes; expected {wanted}")
    if config.run.from_run:
        return
    for share, what in (
        ("fan_out", "fan_out"),
        ("launchers", "launchers"),
        ("rewards", "rewards"),
        ("gateways", "gateways"),
    ):
        if not any(getattr(node, share) for node in nodes):
            raise ConfigError(f"nodes: no node has {what}; expected one at the least")
    if has_servers(config.engine) and not config.engine.urls and not any(node.engines for node in nodes):
        raise ConfigError(f"nodes: engine.kind is {config.engine.kind.value}, and no node has engines")


def with_broker(file: TopologyFile, config: RunConfig) -> RunConfig:
    """The config with the address of the nodes' NATS servers, and three replicas where there are three of them."""
    brokers = [node for node in file.nodes if node.broker]
    if not brokers:
        return config
    urls = ",".join(f"nats://{_host(node.address)}:{file.broker.port}" for node in brokers)
    replicas = max(config.broker.replicas, _REPLICAS) if len(brokers) >= _REPLICAS else config.broker.replicas
    broker = msgspec.structs.replace(config.broker, url=urls, replicas=replicas)
    return msgspec.structs.replace(config, broker=broker)


def node_config(cluster: Cluster, node: NodeSection) -> RunConfig:
    """The config as one node has it: its own folder, and its servers at its own address. Nothing of it changes the log."""
    config, replace = cluster.config, msgspec.structs.replace
    broker, user = config.broker, node.broker_user
    if user:
        password_file = str(Path(broker.password_file).with_name(user))
        broker = replace(broker, user=user, password_file=password_file, inbox_prefix=inbox_prefix(user))
    return replace(
        config,
        broker=broker,
        run=replace(config.run, dir=cluster.run_dir(node.name)),
        gateway=replace(config.gateway, host=node.address),
        engine=replace(config.engine, host=node.address, count=node.engines),
        local_arena={**config.local_arena, "host": node.address} if config.local_arena else config.local_arena,
        metrics=replace(config.metrics, host=node.address) if config.metrics.port else config.metrics,
    )


def this_node(cluster: Cluster) -> NodeSection:
    """The node whose address or name is this machine's.

    Raises:
        ConfigError: none or several are.
    """
    host = socket.gethostname()
    own = {address.address for found in psutil.net_if_addrs().values() for address in found} | {host, socket.getfqdn()}
    found = [node for node in cluster.file.nodes if node.address in own or node.name == host]
    if len(found) == 1:
        return found[0]
    what = "none" if not found else _names(found)
    raise ConfigError(
        f"{cluster.path}: this machine ({host}) is {what} of the nodes by its addresses; say which with --node "
        f"({_names(cluster.file.nodes)})"
    )


def _check_node(node: NodeSection, config: RunConfig) -> None:
    if not is_safe_token(node.name):
        raise ConfigError(f"nodes.name {node.name!r}: expected letters, digits, '_' and '-'")
    if not node.address or any(character.isspace() or character in "/@" for character in node.address):
        raise ConfigError(f"nodes.address {node.address!r} of {node.name}: expected a host name or an IP address")
    for share in ("fan_out", "launchers", "rewards", "gateways", "engines", "gpus"):
        if getattr(node, share) < 0:
            raise ConfigError(f"nodes.{share} of {node.name}: expected 0 or more, found {getattr(node, share)}")
    if node.broker_user and not (config.broker.password_file and is_safe_token(node.broker_user)):
        raise ConfigError(
            f"nodes.broker_user of {node.name}: expected a user's name, and broker.password_file of the config for the folder"
        )
    if node.engines and not has_servers(config.engine):
        raise ConfigError(
            f"nodes.engines of {node.name}: engine.kind is {config.engine.kind.value}, which is in each gateway; "
            "expected gateways instead"
        )


def _exactly(nodes: Sequence[NodeSection], share: str, count: int, why: str = "") -> None:
    found = [node for node in nodes if getattr(node, share)]
    if len(found) != count:
        raise ConfigError(f"nodes: {share} = true on {len(found)} nodes; expected {count}{why}")


def _host(address: str) -> str:
    return f"[{address}]" if ":" in address else address


def _names(nodes: Sequence[NodeSection]) -> str:
    return ", ".join(node.name for node in nodes)


def is_topology(path: str | os.PathLike[str]) -> bool:
    """Whether a path means a topology file: a .toml with nodes."""
    place = Path(path)
    if place.suffix != ".toml" or not place.is_file():
        return False
    try:
        return "nodes" in tomllib.loads(place.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError):
        return False
