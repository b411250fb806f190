"""Kubernetes manifests: a StatefulSet of NATS servers, and a Job with a volume for each node of the topology, which ends with the run.

JSON documents, which YAML readers take.
Secrets are named, never rendered; the README of the rendered folder says how they are made.
"""

from __future__ import annotations

import json
from typing import Any, Final

from ops.deploy.nats import nats_config
from ops.deploy.plan import (
    USERS,
    Places,
    brokers_of,
    config_text,
    has_work,
    node_topology,
    password_env,
    role_of,
    trainers_of,
)
from ops.nodes.file import Cluster, NodeSection
from schemas.errors import ConfigError

Document = dict[str, Any]  # Any: JSON
_NATS: Final = "headrace-nats"
_PASSWORDS: Final = "headrace-nats-passwords"
_TLS: Final = "headrace-nats-tls"
_KEYS: Final = "headrace-keys"
_ENVIRONMENT: Final = "headrace-environment"
_STORE: Final = "state"
_GRACE_S: Final = 90
_USER: Final = 1000
_STORAGE: Final = "50Gi"
_RESTARTS: Final = 1000
EXIT_INTERRUPTED: Final = 130


def render_kubernetes(cluster: Cluster, places: Places) -> dict[str, str]:
    """File name → text.

    Raises:
        ConfigError: a local Arena, or names that Kubernetes doesn't take.
    """
    run, plan = cluster.config.run.id, cluster.file.broker
    count = len(brokers_of(cluster))
    if any(node.arena for node in cluster.file.nodes):
        raise ConfigError("the local Arena serves its own machine only: expected arena.url of an Arena that pods reach")
    label = dns_label(run)
    hosts = [f"{_NATS}-{index}.{_NATS}" for index in range(count)]
    conf = nats_config(
        run,
        places,
        name="$POD_NAME",
        host="0.0.0.0",
        port=plan.port,
        cluster_port=plan.cluster_port,
        routes=[f"{host}:{plan.cluster_port}" for host in hosts],
        max_store_bytes=plan.max_store_bytes,
    )
    urls = ",".join(f"tls://{host}:{plan.port}" for host in hosts)
    workers = [node for node in cluster.file.nodes if has_work(node)]
    addresses = {node.name: f"{_name(label, node)}.{_service(label)}" for node in workers}
    trainers = [node.name for node in trainers_of(cluster)]
    checkpoints = [f"training.checkpoint_dir={json.dumps(_checkpoints(places))}"] if trainers else []
    data = {
        "topology.toml": node_topology(cluster, places, urls, addresses=addresses, more=checkpoints),
        "config.toml": config_text(cluster),
    }
    nats = [
        _config_map(f"{_NATS}-config", label, {"nats.conf": conf}),
        _headless(_NATS, label, {"app": _NATS}, {"client": plan.port, "cluster": plan.cluster_port}),
        _nats_set(run, label, places, count, plan.port),
    ]
    nodes = [
        _config_map(f"{label}-topology", label, data),
        _headless(_service(label), label, {"headrace-run": label, "headrace-part": "node"}, {}),
        *([_shared_volume(label)] if trainers else []),
        *(
            document
            for node in workers
            for document in (_volume(label, node), _node_job(label, places, node, shares=node.name in trainers))
        ),
    ]
    return {"nats.yaml": _text(nats), "nodes.yaml": _text(nodes)}


def dns_label(name: str) -> str:
    """A run's or node's name as Kubernetes takes it.

    Raises:
        ConfigError: it can't be one.
    """
    label = name.lower().replace("_", "-")
    if not label.strip("-") or label != label.strip("-") or len(label) > 40:
        raise ConfigError(f"{name!r}: Kubernetes takes at most 40 letters, digits and inner '-' in names")
    return label


def _nats_set(run: str, label: str, places: Places, count: int, port: int) -> Document:
    passwords = [
        {
            "name": password_env(run, role),
            "valueFrom": {"secretKeyRef": {"name": _PASSWORDS, "key": role.value}},
        }
        for role in USERS
    ]
    container: Document = {
        "name": "nats",
        "image": places.nats_image,
        "command": ["nats-server", "-c", f"{places.etc}/nats.conf"],
        "env": [{"name": "POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}, *passwords],
        "ports": [{"name": "client", "containerPort": port}],
        "readinessProbe": {"tcpSocket": {"port": port}, "periodSeconds": 5},
        "volumeMounts": [
            {"name": "config", "mountPath": f"{places.etc}/nats.conf", "subPath": "nats.conf", "readOnly": True},
            {"name": "tls", "mountPath": f"{places.etc}/tls", "readOnly": True},
            {"name": _STORE, "mountPath": places.state},
        ],
    }
    spec: Document = {
        "affinity": {"podAntiAffinity": _apart({"app": _NATS})},
        "containers": [container],
        "securityContext": _security(),
        "terminationGracePeriodSeconds": _GRACE_S,
        "volumes": [
            {"name": "config", "configMap": {"name": f"{_NATS}-config"}},
            {"name": "tls", "secret": {"secretName": _TLS, "defaultMode": 0o440}},
        ],
    }
    # All servers start together: each waits for the others before it serves streams.
    claim: Document = {
        "metadata": {"name": _STORE},
        "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": _STORAGE}}},
    }
    return {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": _metadata(_NATS, label),
        "spec": {
            "replicas": count,
            "serviceName": _NATS,
            "podManagementPolicy": "Parallel",
            "selector": {"matchLabels": {"app": _NATS}},
            "template": {"metadata": {"labels": {"app": _NATS}}, "spec": spec},
            "volumeClaimTemplates": [claim],
        },
    }


def _node_job(label: str, places: Places, node: NodeSection, *, shares: bool) -> Document:
    """Args:
    shares: it has ranks of a trainer over several nodes.
    """
    name = _name(label, node)
    labels = {"headrace-run": label, "headrace-part": "node", "headrace-node": dns_label(node.name)}
    resources: Document = {"limits": {"nvidia.com/gpu": str(node.gpus)}} if node.gpus else {}
    container: Document = {
        "name": "headrace",
        "image": places.image,
        "command": ["headrace", "up", f"{places.etc}/topology.toml", "--node", node.name],
        "args": ["--address", f"{node.name}=$(POD_IP)"],
        "env": [
            {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
            {"name": "HOME", "value": places.state},
            {"name": "HEADRACE_CACHE", "value": f"{places.state}/cache"},
        ],
        "envFrom": [{"secretRef": {"name": _ENVIRONMENT, "optional": True}}],
        "resources": resources,
        "volumeMounts": [
            *(
                {"name": "topology", "mountPath": f"{places.etc}/{file}", "subPath": file, "readOnly": True}
                for file in ("topology.toml", "config.toml")
            ),
            {"name": "keys", "mountPath": f"{places.etc}/secrets.json", "subPath": "secrets.json", "readOnly": True},
            {"name": "passwords", "mountPath": f"{places.etc}/passwords", "readOnly": True},
            {"name": "tls", "mountPath": f"{places.etc}/tls", "readOnly": True},
            {"name": _STORE, "mountPath": places.state},
            {"name": "shared-memory", "mountPath": "/dev/shm"},  # noqa: S108 - where torch and servers look for it
            *([{"name": "checkpoints", "mountPath": _checkpoints(places)}] if shares else []),
        ],
    }
    password = {"key": role_of(node).value, "path": role_of(node).value}
    authority = {"key": "ca.crt", "path": "ca.crt"}
    spec: Document = {
        "hostname": name,
        "subdomain": _service(label),
        "restartPolicy": "Never",
        "containers": [container],
        "securityContext": _security(),
        "terminationGracePeriodSeconds": _GRACE_S,
        "volumes": [
            {"name": _STORE, "persistentVolumeClaim": {"claimName": name}},
            {"name": "topology", "configMap": {"name": f"{label}-topology"}},
            {"name": "keys", "secret": {"secretName": _KEYS, "defaultMode": 0o440}},
            {"name": "passwords", "secret": {"secretName": _PASSWORDS, "defaultMode": 0o440, "items": [password]}},
            {"name": "tls", "secret": {"secretName": _TLS, "items": [authority]}},
            {"name": "shared-memory", "emptyDir": {"medium": "Memory"}},
            *(
                [{"name": "checkpoints", "persistentVolumeClaim": {"claimName": f"{label}-checkpoints"}}]
                if shares
                else []
            ),
        ],
    }
    stopped = {"containerName": "headrace", "operator": "In", "values": [EXIT_INTERRUPTED]}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": _metadata(name, label),
        "spec": {
            "backoffLimit": _RESTARTS,
            # Somebody stopped the run by `headrace down`: the node isn't started again.
            "podFailurePolicy": {"rules": [{"action": "FailJob", "onExitCodes": stopped}]},
            "template": {"metadata": {"labels": labels}, "spec": spec},
        },
    }


def _volume(label: str, node: NodeSection) -> Document:
    """What a node keeps over restarts: its run folder, with checkpoints where it trains."""
    spec: Document = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": _STORAGE}}}
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": _metadata(_name(label, node), label),
        "spec": spec,
    }


def _shared_volume(label: str) -> Document:
    """Checkpoints that the ranks of several nodes write together."""
    spec: Document = {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": _STORAGE}}}
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": _metadata(f"{label}-checkpoints", label),
        "spec": spec,
    }


def _checkpoints(places: Places) -> str:
    """Where that is mounted."""
    return f"{places.state}-checkpoints"


def _headless(name: str, label: str, selector: dict[str, str], ports: dict[str, int]) -> Document:
    spec: Document = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": selector}
    if ports:
        spec["ports"] = [{"name": port_name, "port": port} for port_name, port in ports.items()]
    return {"apiVersion": "v1", "kind": "Service", "metadata": _metadata(name, label), "spec": spec}


def _config_map(name: str, label: str, data: dict[str, str]) -> Document:
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": _metadata(name, label), "data": data}


def _metadata(name: str, label: str) -> Document:
    return {"name": name, "labels": {"app.kubernetes.io/part-of": "headrace", "headrace-run": label}}


def _apart(labels: dict[str, str]) -> Document:
    term: Document = {"labelSelector": {"matchLabels": labels}, "topologyKey": "kubernetes.io/hostname"}
    return {"preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 100, "podAffinityTerm": term}]}


def _security() -> Document:
    return {"runAsNonRoot": True, "runAsUser": _USER, "runAsGroup": _USER, "fsGroup": _USER}


def _name(label: str, node: NodeSection) -> str:
    return f"{label}-{dns_label(node.name)}"


def _service(label: str) -> str:
    return f"{label}-nodes"


def _text(documents: list[Document]) -> str:
    return "---\n" + "\n---\n".join(json.dumps(document, indent=2) for document in documents) + "\n"
