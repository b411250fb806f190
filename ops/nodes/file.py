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
from ops.config import RunConfig, load_config
from ops.config_shape import check_keys
from ops.engines.plan import has_servers
from ops.nodes.ranks import RankGroup, RankMember
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
    """Runs the trainer with all `training.ranks`, and publishes its weights. On several nodes: each runs a part of the ranks; rank 0 and
    the weights are on the first one of the file."""
    ranks: int = 0
    """How many of `training.ranks` are here, where several nodes train; 0 on all of them: equally many."""
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
    tls_cert_file: str = ""
    """Certificate of a server for its node's address, for server and client use; relative to the topology, `{node}` stands for the node's
    name. Empty: no TLS."""
    tls_key_file: str = ""
    """Its key (mode 0600)."""
    tls_ca_file: str = ""
    """Authority of all these certificates: nodes check servers by it, and servers each other."""
    tls_verify_clients: bool = False
    """Nodes show a certificate of that authority, too: each has a file of its own at `tls_cert_file` and `tls_key_file`."""


class TrainerPlan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[trainer]: a trainer over several nodes."""

    port: int = 29500
    """Where its ranks meet, at the address of the first node with a part of it; 0: any free one."""


class TopologyFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A whole TOPOLOGY.toml."""

    config: str
    """The run's config file, relative to this one."""
    set: list[str] = []
    """Overrides of the config, as of `--set`."""
    secrets: str = "secrets.json"
    """Keys that all nodes share, relative to this file; the control node makes it, every other node needs a copy (mode 0600)."""
    broker: BrokerPlan = BrokerPlan()
    trainer: TrainerPlan = TrainerPlan()
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

    def broker_file(self, setting: str, node: str) -> str:
        """Where a node has a file that `[broker]` names; empty where it names none."""
        return _broker_file(self.path.parent, setting, node)

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
    config = load_config(place.parent / file.config, [*file.set, *overrides], with_imports=False)
    check_topology(file, config)
    return Cluster(path=place, file=file, config=with_broker(file, config, place.parent))


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
    if config.run.rollout_only:
        _exactly(nodes, "trainer", 0, " (run.rollout_only trains nothing)")
    else:
        _check_trainer(nodes, config)
    local = config.arena.url == LOCAL and not config.run.from_run and uses_arena(config)
    _exactly(
        nodes, "arena", 1 if local else 0, "" if local else " (no stream of the config is played by a local Arena)"
    )
    embedded = config.broker.url == "embedded"
    count = sum(node.broker for node in nodes)
    if count not in _MOST_BROKERS or (count == 0) == embedded:
        wanted = "1, 3 or 5 nodes (broker.url is embedded)" if embedded else f"none: broker.url is {config.broker.url}"
        raise ConfigError(f"nodes: broker = true on {count} nodes; expected {wanted}")
    _check_tls(file.broker)
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


def rank_group(cluster: Cluster, node: NodeSection) -> RankGroup | None:
    """The ranks of a trainer over several nodes, as one of these sees them; None for others, and where one node has all."""
    trainers = [one for one in cluster.file.nodes if one.trainer]
    if not node.trainer or len(trainers) == 1:
        return None
    even = cluster.config.training.ranks // len(trainers)
    return RankGroup(
        node=node.name,
        address=node.address,
        members=tuple(RankMember(node=one.name, num_ranks=one.ranks or even) for one in trainers),
        master=trainers[0].address,
        port=cluster.file.trainer.port,
    )


def with_broker(file: TopologyFile, config: RunConfig, folder: Path) -> RunConfig:
    """The config with the address of the nodes' NATS servers, their authority where they have TLS, and three replicas where there are three of
    them.

    Args:
        folder: of the topology.
    """
    brokers = [node for node in file.nodes if node.broker]
    if not brokers:
        return config
    scheme = "tls" if file.broker.tls_cert_file else "nats"
    urls = ",".join(f"{scheme}://{_host(node.address)}:{file.broker.port}" for node in brokers)
    authority = config.broker.tls_ca_file or _broker_file(folder, file.broker.tls_ca_file, "")
    replicas = max(config.broker.replicas, _REPLICAS) if len(brokers) >= _REPLICAS else config.broker.replicas
    broker = msgspec.structs.replace(config.broker, url=urls, replicas=replicas, tls_ca_file=authority)
    return msgspec.structs.replace(config, broker=broker)


def node_config(cluster: Cluster, node: NodeSection) -> RunConfig:
    """The config as one node has it: its own folder, and its servers at its own address. Nothing of it changes the log."""
    config, replace = cluster.config, msgspec.structs.replace
    broker, user = config.broker, node.broker_user
    if user:
        password_file = str(Path(broker.password_file).with_name(user))
        broker = replace(broker, user=user, password_file=password_file, inbox_prefix=inbox_prefix(user))
    plan = cluster.file.broker
    if plan.tls_verify_clients and cluster.brokers and not broker.tls_cert_file:
        cert, key = (cluster.broker_file(setting, node.name) for setting in (plan.tls_cert_file, plan.tls_key_file))
        broker = replace(broker, tls_cert_file=cert, tls_key_file=key)
    return replace(
        config,
        broker=broker,
        run=replace(config.run, dir=cluster.run_dir(node.name)),
        gateway=replace(config.gateway, host=node.address),
        engine=replace(config.engine, host=node.address, count=node.engines if has_servers(config.engine) else None),
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
    for share in ("fan_out", "launchers", "rewards", "gateways", "engines", "gpus", "ranks"):
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


def _check_tls(plan: BrokerPlan) -> None:
    files = {name: getattr(plan, name) for name in ("tls_cert_file", "tls_key_file", "tls_ca_file")}
    missing = [name for name, file in files.items() if not file]
    if len(missing) not in (0, len(files)) or (missing and plan.tls_verify_clients):
        raise ConfigError(
            f"[broker]: TLS needs tls_cert_file, tls_key_file and tls_ca_file; found no {', '.join(missing)}"
        )


def _broker_file(folder: Path, setting: str, node: str) -> str:
    return str(folder / setting.replace("{node}", node)) if setting else ""


def _check_trainer(nodes: Sequence[NodeSection], config: RunConfig) -> None:
    trainers, training = [node for node in nodes if node.trainer], config.training
    idle = [node.name for node in nodes if node.ranks and not node.trainer]
    if idle:
        raise ConfigError(f"nodes.ranks of {idle[0]}: expected trainer = true beside it, or no ranks")
    if not trainers:
        raise ConfigError("nodes: trainer = true on 0 nodes; expected 1 or more")
    told = sum(node.ranks for node in trainers)
    if told and (told != training.ranks or not all(node.ranks for node in trainers)):
        found = ", ".join(f"{node.name} {node.ranks}" for node in trainers)
        raise ConfigError(
            f"nodes.ranks: expected {training.ranks} (training.ranks) over all nodes with trainer = true, or none told; found {found}"
        )
    if len(trainers) == 1:
        return
    if not told and training.ranks % len(trainers):
        raise ConfigError(
            f"training.ranks = {training.ranks} can't be shared equally by {len(trainers)} nodes ({_names(trainers)}): say "
            "nodes.ranks of each, or take a multiple"
        )
    if training.ranks < len(trainers):
        raise ConfigError(f"training.ranks = {training.ranks}: expected at least one for each of {_names(trainers)}")
    if training.backend == "standin":
        raise ConfigError(
            "nodes: trainer = true on several nodes; training.backend = standin has one rank: expected one"
        )
    if not training.checkpoint_dir:
        raise ConfigError(
            "training.checkpoint_dir: the ranks of several nodes write each checkpoint together; expected a folder that all "
            f"of {_names(trainers)} share"
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
