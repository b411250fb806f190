"""A run's streams and durables as data, with their numbers, and how they differ from what stands on a server.

Retention is part of it: a log refuses new messages when it is full, it never drops old ones by itself. Pure; it must not
talk to any server (broker.jetstream.admin does).
"""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from broker.api import ConsumerSettings
from broker.naming import run_names
from broker.shapes import ConsumerConfig, StreamConfig

NANOSECONDS: Final = 1_000_000_000
MEBIBYTE: Final = 1024 * 1024
MAX_WAITING: Final = 4096
"""Parked pulls that a durable keeps: about one or two a worker."""


class RunLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How much a run may hold on the broker, and how safely."""

    log_max_bytes: int = 1024 * MEBIBYTE
    payload_max_bytes: int = 4096 * MEBIBYTE
    state_max_bytes: int = 256 * MEBIBYTE
    replicas: int = 1
    """1 on a single server, 3 or 5 on a cluster."""
    storage: Literal["file", "memory"] = "file"
    """`memory` loses everything with the server: for tests of exactly that."""
    duplicate_window_s: float = 30.0
    """Message ids are remembered for so long; only has to outlast the tries of one publish."""


class StreamSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One stream."""

    name: str
    subjects: list[str]
    max_bytes: int
    max_msgs_per_subject: int = -1
    discard_new_per_subject: bool = False
    """The server itself refuses a second message on a subject, also from foreign clients."""
    deny_delete: bool = False
    replicas: int = 1
    storage: Literal["file", "memory"] = "file"
    duplicate_window_s: float = 30.0


class DurableSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One durable consumer of the log."""

    name: str
    filters: list[str]
    ack_wait_s: float = 10.0
    max_ack_pending: int = 4096
    replicas: int = 1


class Topology(msgspec.Struct, frozen=True, kw_only=True):
    """All that a run needs on the broker."""

    run: str
    streams: list[StreamSpec]
    durables: list[DurableSpec] = []

    @property
    def log(self) -> StreamSpec:
        """The control stream."""
        return self.streams[0]


def durable(name: str, filters: list[str], settings: ConsumerSettings) -> DurableSpec:
    """The durable that `consume` with these arguments expects."""
    return DurableSpec(
        name=name,
        filters=filters,
        ack_wait_s=settings.ack_wait_s,
        max_ack_pending=settings.max_ack_pending,
    )


def run_topology(run: str, limits: RunLimits | None = None, durables: list[DurableSpec] | None = None) -> Topology:
    """The streams of a run (log, state, payloads) and the durables of its log, all equally often replicated."""
    limits = RunLimits() if limits is None else limits
    names = run_names(run)

    def stream(name: str, prefix: str, max_bytes: int, *, once: bool, deny_delete: bool) -> StreamSpec:
        return StreamSpec(
            name=name,
            subjects=[f"{prefix}>"],
            max_bytes=max_bytes,
            max_msgs_per_subject=1,
            discard_new_per_subject=once,
            deny_delete=deny_delete,
            replicas=limits.replicas,
            storage=limits.storage,
            duplicate_window_s=limits.duplicate_window_s,
        )

    return Topology(
        run=run,
        streams=[
            stream(names.log_stream, names.log_prefix, limits.log_max_bytes, once=True, deny_delete=True),
            stream(names.state_stream, names.state_prefix, limits.state_max_bytes, once=False, deny_delete=False),
            # A chunk may be stored again, which renews its age: its name is its checksum, so its bytes are the same.
            stream(names.payload_stream, names.payload_prefix, limits.payload_max_bytes, once=False, deny_delete=True),
        ],
        durables=[msgspec.structs.replace(spec, replicas=limits.replicas) for spec in durables or []],
    )


def stream_body(spec: StreamSpec) -> dict[str, object]:
    """The server's JSON for a stream."""
    return {
        "name": spec.name,
        "subjects": spec.subjects,
        "retention": "limits",
        "storage": spec.storage,
        "num_replicas": spec.replicas,
        "max_bytes": spec.max_bytes,
        "max_msgs": -1,
        "max_consumers": -1,
        "max_msg_size": -1,
        "max_age": 0,
        "max_msgs_per_subject": spec.max_msgs_per_subject,
        "discard": "new",
        "discard_new_per_subject": spec.discard_new_per_subject,
        "duplicate_window": round(spec.duplicate_window_s * NANOSECONDS),
        "allow_direct": True,
        "deny_delete": spec.deny_delete,
        "deny_purge": False,
    }


def durable_body(stream: str, spec: DurableSpec) -> dict[str, object]:
    """The server's JSON for making a durable."""
    config: dict[str, object] = {
        "name": spec.name,
        "durable_name": spec.name,
        "deliver_policy": "all",
        "ack_policy": "explicit",
        "ack_wait": round(spec.ack_wait_s * NANOSECONDS),
        "max_ack_pending": spec.max_ack_pending,
        "max_deliver": -1,
        "max_waiting": MAX_WAITING,
        "replay_policy": "instant",
        "num_replicas": spec.replicas,
    }
    if len(spec.filters) == 1:
        config["filter_subject"] = spec.filters[0]
    else:
        config["filter_subjects"] = spec.filters
    return {"stream_name": stream, "config": config}


def stream_spec(config: StreamConfig) -> StreamSpec:
    """What a server's settings amount to."""
    return StreamSpec(
        name=config.name,
        subjects=config.subjects,
        max_bytes=config.max_bytes,
        max_msgs_per_subject=config.max_msgs_per_subject,
        discard_new_per_subject=config.discard_new_per_subject,
        deny_delete=config.deny_delete,
        replicas=config.num_replicas,
        storage="memory" if config.storage == "memory" else "file",
        duplicate_window_s=config.duplicate_window / NANOSECONDS,
    )


def durable_spec(name: str, config: ConsumerConfig) -> DurableSpec:
    """What a server's settings amount to."""
    return DurableSpec(
        name=name,
        filters=config.filters,
        ack_wait_s=config.ack_wait / NANOSECONDS,
        max_ack_pending=config.max_ack_pending,
        replicas=config.num_replicas or 1,
    )


def difference(declared: StreamSpec | DurableSpec, found: StreamSpec | DurableSpec, what: str) -> list[str]:
    """One line for each setting that differs."""
    lines: list[str] = []
    for field in declared.__struct_fields__:
        want, have = getattr(declared, field), getattr(found, field)
        if isinstance(want, list) and isinstance(have, list):
            same = sorted(map(str, want)) == sorted(map(str, have))
        else:
            same = want == have
        if not same:
            lines.append(f"{what}: {field}: expected {want}, found {have}")
    return lines


def foreign_settings(config: StreamConfig) -> list[str]:
    """Settings of a stream that no topology of ours declares and that would lose messages."""
    wrong: list[str] = []
    expected: dict[str, object] = {"discard": "new", "retention": "limits", "max_age": 0, "max_msgs": -1}
    for field, want in expected.items():
        have = getattr(config, field)
        if have != want:
            wrong.append(f"stream {config.name}: {field}: expected {want}, found {have}")
    if not config.allow_direct:
        wrong.append(f"stream {config.name}: allow_direct: expected True, found False")
    return wrong
