"""What engines say of themselves: announced on core subjects, not on the log."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from schemas.ids import encode_token


class EngineState(StrEnum):
    """Where an engine is in its life."""

    STARTING = "starting"
    """Its server starts, or starts again."""
    LOADING = "loading"
    """It is healthy and catches up on weights."""
    SERVING = "serving"
    """It takes requests."""
    QUARANTINED = "quarantined"
    """It does not answer, or what it would answer can't be trusted."""
    DRAINING = "draining"
    """It finishes what it has and takes nothing new."""


class EngineAnnouncement(msgspec.Struct, frozen=True, kw_only=True):
    """How an engine is: told by its worker every second, and at once at every change."""

    name: str
    """Unique in the run."""
    kind: str
    """vllm, sglang …"""
    url: str = ""
    """Where its server answers; empty while it has none."""
    model: str = ""
    """The name under which the server knows the policy."""
    incarnation: str = ""
    """Changes whenever the server's process starts anew, or was out of sight."""
    state: EngineState
    reason: str = ""
    """Why it is in this state, in words."""
    since_unix_s: float = 0.0
    """When it came into this state."""
    version: int = 0
    """Weight version that it confirmed."""
    refused_version: int = -1
    """Newest version that it could not load and therefore does not serve; -1: none."""
    running: int = 0
    """Requests being sampled, of all gateways."""
    waiting: int = 0
    """Requests queued in the server."""
    capacity: int = 1
    """Requests that it samples at once at the most."""
    max_context: int = 0
    tokens_per_s: float = 0.0
    num_restarts: int = 0
    attached: bool = False
    """Its server was there before and is not started or stopped by the run."""
    worker: str = ""
    """host:pid of its worker."""
    log_file: str = ""
    """Where its server writes; empty for attached ones."""
    unix_time_s: float = 0.0


_PREFIX = "hre"


def engine_subject(run: str, name: str) -> str:
    """Where one engine announces itself."""
    return f"{_PREFIX}.{run}.{encode_token(name)}"


def engines_pattern(run: str) -> str:
    """What all engines of a run announce."""
    return f"{_PREFIX}.{run}.*"
