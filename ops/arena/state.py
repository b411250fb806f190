"""What a local Arena remembers: registrations, tasks, datasets. No HTTP, no processes."""

from __future__ import annotations

import secrets
from collections import OrderedDict
from datetime import UTC, datetime
from typing import Annotated

import msgspec

from ops.arena.config import ArenaServerConfig, HarnessSpec
from ops.arena.faults import Faults
from ops.arena.tasks import TaskSource

Json = dict[str, object]
MODEL_PREFIX = "stream-areal-"
TERMINAL = frozenset((
    "DONE", "OK",
    "CANCELLED", "COLLECT_FAILED", "EVAL_FAILED", "FAILED", "HARNESS_FAILED", "NO_OUTPUT", "SETUP_FAILED", "TIMEOUT",
))  # fmt: skip


class ModelEndpoint(msgspec.Struct, frozen=True, kw_only=True):
    """Where a registered model's calls go."""

    endpoint_id: str
    upstream_model: str
    base_url: Annotated[str, msgspec.Meta(pattern=r"^https?://.*[^/]$")]
    api_key: str
    inbound_protos: tuple[str, ...]
    enabled: bool = True


class Registration(msgspec.Struct, frozen=True, kw_only=True):
    """A registered model."""

    model_name: Annotated[str, msgspec.Meta(pattern=f"^{MODEL_PREFIX}[A-Za-z0-9_.-]+$")]
    endpoints: Annotated[tuple[ModelEndpoint, ...], msgspec.Meta(min_length=1)]
    enabled: bool = True
    metadata: dict[str, str] = {}

    def shown(self) -> Json:
        """As GET answers it: without keys."""
        endpoints = [
            {"endpoint_id": e.endpoint_id, "upstream_model": e.upstream_model, "base_url": e.base_url}
            for e in self.endpoints
        ]
        return {
            "model_name": self.model_name,
            "endpoints": endpoints,
            "enabled": self.enabled,
            "metadata": self.metadata,
        }


class LaunchRequest(msgspec.Struct, frozen=True, kw_only=True):
    """POST /streams/{id}/launch_one_task."""

    data_id: str
    model_name: str
    base_url: Annotated[str, msgspec.Meta(pattern="^https?://")]
    api_key: str
    envs: dict[str, str] = {}
    session_id: str | None = None
    harness: str | None = None


class Task:
    """One launched task; changes as it runs."""

    def __init__(self, *, stream_id: str, request: LaunchRequest, harness: HarnessSpec, reward_ref: Json) -> None:
        self.task_id = f"task-{secrets.token_hex(8)}"
        self.stream_id = stream_id
        self.request = request
        self.harness = harness
        self.reward_ref = reward_ref
        self.status = "PENDING"
        self.score: float | None = None
        self.raw: Json | None = None
        self.receipt: msgspec.Raw | None = None
        self.computed_at: str | None = None

    @property
    def ended(self) -> bool:
        """Whether the status is terminal."""
        return self.status in TERMINAL

    def end(self, status: str, *, score: float | None, raw: Json) -> None:
        """Put the terminal result on."""
        self.status, self.score, self.raw = status, score, raw
        self.computed_at = datetime.now(UTC).isoformat()

    def result(self) -> Json:
        """As GET /tasks/{task_id}/result answers it."""
        ended = self.ended
        return {
            "task_id": self.task_id,
            "status": self.status,
            "score": self.score,
            "raw": self.raw,
            "artifacts_uri": f"arena://tasks/{self.task_id}" if ended else None,
            "trace_id": self.task_id.removeprefix("task-") if ended else None,
            "computed_at": self.computed_at,
        }

    def listed(self) -> Json:
        """As GET /streams/{id}/tasks lists it."""
        harness_ref = {"key": self.harness.key, "version": self.harness.version}
        task = {"task_id": self.task_id, "status": self.status, "harness_ref": harness_ref}
        return {"task": {**task, "reward_ref": self.reward_ref}}


class ArenaState:
    """Everything that the API reads and changes."""

    def __init__(self, config: ArenaServerConfig) -> None:
        self.config = config
        self.faults = Faults(config.faults)
        self.sources = {spec.stream_id: TaskSource(spec) for spec in config.streams}
        self.harnesses = {f"{h.key}@{h.version}": h for h in config.harnesses}
        self.registrations: dict[str, Registration] = {}
        self.tasks: OrderedDict[str, Task] = OrderedDict()
        self.launches = 0
        self._ended = 0

    def stream(self, stream_id: str) -> Json:
        """A stream as GET answers it."""
        spec = self.sources[stream_id].spec
        key, _, version = spec.harness.partition("@")
        return {
            "stream_id": stream_id,
            "name": stream_id,
            "status": spec.status,
            "default_harness_ref": {"key": key, "version": version},
            "default_reward_ref": self.reward_ref(stream_id),
        }

    def reward_ref(self, stream_id: str) -> Json:
        """The stream's default reward."""
        source = self.sources[stream_id]
        return {"key": source.reward_key, "version": source.spec.reward_version}

    def add(self, stream_id: str, request: LaunchRequest, harness: HarnessSpec) -> Task:
        """A new task; the oldest ended ones beyond the limit are forgotten."""
        task = Task(stream_id=stream_id, request=request, harness=harness, reward_ref=self.reward_ref(stream_id))
        self.tasks[task.task_id] = task
        self.launches += 1
        if self.faults.collects(self.launches):
            self.registrations.clear()
        return task

    def count_ended(self) -> None:
        """Count one more ended task and forget those beyond the limit."""
        self._ended += 1
        if self._ended <= self.config.max_kept_tasks:
            return
        oldest = next((task_id for task_id, task in self.tasks.items() if task.ended), None)
        if oldest is not None:
            del self.tasks[oldest]
            self._ended -= 1

    def stream_tasks(self, stream_id: str) -> list[Task]:
        """A stream's tasks, the newest first."""
        return [task for task in reversed(self.tasks.values()) if task.stream_id == stream_id]
