"""One node of a run, ready to be started: its config, its share, its NATS server. Pure."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import msgspec

from broker.embedded import EmbeddedSettings
from ops.config import RunConfig
from ops.nodes.file import Cluster, node_config, rank_group
from ops.nodes.share import Share, share_of, whole

_SYNC_INTERVAL: Final = "2m"


class Site(msgspec.Struct, frozen=True, kw_only=True):
    """One node."""

    config: RunConfig
    """As this node has it."""
    share: Share
    server: EmbeddedSettings | None = None
    """The NATS server that this node runs."""
    servers_share_token: bool = False
    """The NATS servers of a topology's nodes: one token for all."""
    secrets_file: Path | None = None
    """Keys that all nodes share; None = the folder's own."""
    address: str = ""
    """Where other nodes reach this one; empty: there are none."""

    nodes: tuple[str, ...] = ()
    """Names of all nodes of the topology."""

    @property
    def in_topology(self) -> bool:
        """Whether other nodes may belong to the run."""
        return bool(self.address)


def only_node(config: RunConfig) -> Site:
    """Everything on this machine."""
    server = _server(config) if config.broker.url == "embedded" else None
    return Site(config=config, share=whole(config), server=server)


def site_of(cluster: Cluster, name: str) -> Site:
    """One node of a topology.

    Raises:
        ConfigError: there is no such node.
    """
    node = cluster.node(name)
    config, plan, brokers = node_config(cluster, node), cluster.file.broker, cluster.brokers
    server = None
    if node.broker:
        alone = len(brokers) == 1
        server = msgspec.structs.replace(
            _server(config),
            host=node.address,
            port=plan.port,
            max_store_bytes=plan.max_store_bytes,
            server_name=f"headrace-{node.name}",
            route_port=0 if alone else plan.cluster_port,
            # Without its own: a server that counts itself among the others waits for all of them before the first start.
            routes=tuple(
                f"nats://{_host(other.address)}:{plan.cluster_port}" for other in brokers if other is not node
            ),
            route_login=not alone,
            tls_cert_file=cluster.broker_file(plan.tls_cert_file, name),
            tls_key_file=cluster.broker_file(plan.tls_key_file, name),
            tls_ca_file=cluster.broker_file(plan.tls_ca_file, name),
            tls_verify_clients=plan.tls_verify_clients,
        )
    return Site(
        config=config,
        share=share_of(node, config, rank_group(cluster, node)),
        server=server,
        servers_share_token=bool(brokers),
        secrets_file=cluster.secrets_file,
        address=node.address,
        nodes=tuple(other.name for other in cluster.file.nodes),
    )


def _server(config: RunConfig) -> EmbeddedSettings:
    return EmbeddedSettings(
        binary=config.broker.server_binary,
        port=config.broker.server_port,
        sync_interval="always" if config.broker.sync_always else _SYNC_INTERVAL,
    )


def _host(address: str) -> str:
    return f"[{address}]" if ":" in address else address
