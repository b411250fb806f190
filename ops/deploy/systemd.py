"""systemd units: one for each node, one for its NATS server."""

from __future__ import annotations

from ops.deploy.nats import nats_config
from ops.deploy.plan import (
    Places,
    bracketed,
    broker_urls,
    brokers_of,
    checked_place,
    config_text,
    has_work,
    node_topology,
    trainers_of,
)
from ops.nodes.file import Cluster


def render_systemd(cluster: Cluster, places: Places) -> dict[str, str]:
    """File name → text. `NODE/` holds what goes to that node's machine, into the folders that the README says."""
    brokers, plan, run = brokers_of(cluster), cluster.file.broker, cluster.config.run.id
    files = {
        "topology.toml": node_topology(cluster, places, broker_urls(brokers, plan.port)),
        "config.toml": config_text(cluster),
    }
    for node in brokers:
        files[f"{node.name}/nats.conf"] = nats_config(
            run,
            places,
            name=f"headrace-{node.name}",
            host=bracketed(node.address),
            port=plan.port,
            cluster_port=plan.cluster_port,
            routes=[f"{bracketed(other.address)}:{plan.cluster_port}" for other in brokers if other is not node],
            max_store_bytes=plan.max_store_bytes,
        )
        files[f"{node.name}/headrace-nats.service"] = _nats_unit(places)
    for node in cluster.file.nodes:
        if has_work(node):
            shared = cluster.config.training.checkpoint_dir if node in trainers_of(cluster) else ""
            files[f"{node.name}/headrace.service"] = _node_unit(
                places, run, node.name, checked_place(shared or places.state)
            )
    return files


def _nats_unit(places: Places) -> str:
    return f"""[Unit]
Description=NATS server of headrace runs
Wants=network-online.target
After=network-online.target

[Service]
User=headrace
EnvironmentFile={places.etc}/nats.env
ExecStart={places.nats_server} -c {places.etc}/nats.conf
ExecReload=/bin/kill -HUP $MAINPID
Restart=always
RestartSec=2
LimitNOFILE=65536
StateDirectory=headrace
NoNewPrivileges=yes
ProtectSystem=strict
ProtectHome=yes
PrivateTmp=yes
ReadWritePaths={places.state}
TimeoutStopSec=60

[Install]
WantedBy=multi-user.target
"""


def _node_unit(places: Places, run: str, node: str, folder: str) -> str:
    """Args:
    folder: what must be mounted: of a trainer over several nodes the checkpoints that these share.
    """
    return f"""[Unit]
Description=headrace run {run}: node {node}
Wants=network-online.target
After=network-online.target headrace-nats.service
RequiresMountsFor={folder}

[Service]
User=headrace
# Credentials of the Arena and of trackers, NAME=value; not needed by a run without.
EnvironmentFile=-{places.etc}/node.env
ExecStart={places.headrace} up {places.etc}/topology.toml --node {node}
# The run was stopped by `headrace down`: that is no failure.
SuccessExitStatus=130
Restart=on-failure
RestartSec=5
# The supervisor ends its workers in their order.
KillMode=mixed
TimeoutStopSec=90
LimitNOFILE=65536
StateDirectory=headrace
WorkingDirectory={places.state}
Environment=HOME={places.state} HEADRACE_CACHE={places.state}/cache
NoNewPrivileges=yes
PrivateTmp=yes

[Install]
WantedBy=multi-user.target
"""
