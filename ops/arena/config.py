"""What a local Arena serves and how: frozen structs, decoded strictly from TOML.

Knows no server and no dataset library; `ops.arena.tasks` and the rest read it.
"""

from __future__ import annotations

import ipaddress
import math
import os
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Literal

import msgspec

PositiveInt = Annotated[int, msgspec.Meta(ge=1)]
PositiveFloat = Annotated[float, msgspec.Meta(gt=0)]
Probability = Annotated[float, msgspec.Meta(ge=0, le=1)]
Scalar = str | int | float | bool | list[str | int | float]


class ArenaConfigError(ValueError):
    """A setting of the local Arena can't be used; the text starts with its path."""


class HarnessKind(StrEnum):
    """How a harness talks to the model."""

    SCRIPTED = "scripted"
    """Calls no model and answers `scripted_answer`."""
    OPENAI_LOOP = "openai_loop"
    """One chat call."""
    OPENAI_TWO_TURN = "openai_two_turn"
    """Two chat calls: the task, then the second of the stream's turns."""
    RESPONSES_LOOP = "responses_loop"
    """All of the stream's turns through the Responses protocol."""
    ANTHROPIC_LOOP = "anthropic_loop"
    """All of the stream's turns through the Anthropic messages protocol."""
    COMMAND = "command"
    """A program of its own per episode."""


class HarnessSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One published version of a harness."""

    key: str
    version: str = "1"
    kind: HarnessKind
    status: str = "PUBLISHED"
    system: str = ""
    """System prompt; empty sends none."""
    max_tokens: PositiveInt = 64
    temperature: Annotated[float, msgspec.Meta(ge=0)] | None = None
    """Sent with each call when given."""
    stream: bool = False
    """Ask for streamed answers."""
    timeout_s: PositiveFloat = 600.0
    """The task's own time limit in the sandbox; beyond it the task ends as TIMEOUT."""
    scripted_answer: str = "{answer}"
    """A template as in StreamSpec.turns; `{answer}` is the right one."""
    command: tuple[str, ...] = ()
    """Program and arguments; `{prompt}`, `{model}`, `{base_url}`, `{headers_json}` and `{workdir}` are filled in."""
    answer_file: str = ""
    """Where a command leaves its answer, inside its working folder; empty takes its standard output."""


class StreamSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One stream: a reasoning-gym dataset, how it is asked, how it is scored."""

    stream_id: str
    dataset: str
    """Name of a reasoning-gym dataset."""
    dataset_options: dict[str, Scalar] = {}
    """Its own options, such as min_word_len."""
    size: PositiveInt = 256
    seed: int = 0
    turns: tuple[str, ...] = ("{question}",)
    """User texts, in order. `{question}` and the task's metadata by name (such as `{word}`); from the second on also `{reply}`,
    the model's answer to the turn before."""
    max_turns: PositiveInt = 8
    """Model calls a harness may make per task."""
    lowercase: bool = False
    """Turn the texts shown to the model into lower case, where the scorer doesn't mind."""
    extract: Literal["whole", "last_line", "tag"] = "whole"
    """Which part of the last reply is the answer; `tag` is <answer>…</answer>."""
    scorer: Literal["partial", "exact"] = "partial"
    """The dataset's own score, or 1.0 only where that is full and 0.0 otherwise."""
    harness: str
    """Default harness, "key@version"."""
    reward_key: str = ""
    """Key of the default reward; empty is the dataset's name."""
    reward_version: str = "1"
    domain: str = ""
    """The one `domain:` tag; empty is the dataset's name."""
    status: str = "ACTIVE"


class CallName(StrEnum):
    """A row of the API table, as a fault plan names it."""

    STREAMS_LIST = "streams.list"
    STREAMS_GET = "streams.get"
    DATASET = "dataset"
    TASKS = "tasks"
    HARNESS = "harness"
    MODELS_REGISTER = "models.register"
    MODELS_GET = "models.get"
    MODELS_RENEW = "models.renew"
    MODELS_DELETE = "models.delete"
    LAUNCH = "launch"
    RESULT = "result"
    RECEIPT = "receipt"
    MODEL_CALL = "model_call"


class CallFault(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A fault of one kind of call."""

    call: CallName
    kind: Literal["delay", "status", "lost_answer", "changed_total"]
    """`status` answers instead of acting; `lost_answer` acts, then cuts the connection; `changed_total` lies in a page."""
    probability: Probability = 1.0
    skip: int = 0
    """Calls that pass before this fault counts."""
    limit: int | None = None
    """At most so many times; None is without end."""
    delay_s: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    status: Annotated[int, msgspec.Meta(ge=400, le=599)] = 503
    retry_after_s: int | None = None


class EpisodeFault(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A fault of launched tasks."""

    kind: Literal["status", "hung_boot", "immediate"]
    """`status` ends the task so; `hung_boot` never starts it; `immediate` answers the launch with the terminal result."""
    stream_id: str = ""
    """Empty is every stream."""
    status: Literal[
        "CANCELLED",
        "COLLECT_FAILED",
        "EVAL_FAILED",
        "FAILED",
        "HARNESS_FAILED",
        "NO_OUTPUT",
        "SETUP_FAILED",
        "TIMEOUT",
        "DONE",
        "OK",
    ] = "FAILED"
    run_harness: bool = True
    """Let the harness call the model before the status is put on."""
    with_score: bool = False
    """Give the failed task a score all the same; it must not count."""
    receipt_json: str = ""
    """The task's own receipt."""
    probability: Probability = 1.0
    skip: int = 0
    limit: int | None = None


class FaultPlan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All that goes wrong, decided by a seed."""

    seed: int = 0
    calls: tuple[CallFault, ...] = ()
    episodes: tuple[EpisodeFault, ...] = ()
    collect_after_launches: tuple[int, ...] = ()
    """At each of these launch counts all registrations are garbage-collected."""


class ArenaServerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A whole local Arena."""

    host: str = "127.0.0.1"
    """A loopback address; anything else is refused."""
    port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 0
    """0 lets the system choose."""
    openapi_token_env: str = "ARENA_OPENAPI_TOKEN"
    """Environment variable with the token of the control plane."""
    llm_api_key_env: str = "ARENA_LLM_API_KEY"
    """Environment variable with the key of the model gateway."""
    streams: tuple[StreamSpec, ...]
    harnesses: tuple[HarnessSpec, ...]
    pool_processes: PositiveInt = 2
    """Harness processes, each running many episodes at once."""
    max_running_episodes: PositiveInt = 1024
    """Further tasks stay PENDING."""
    max_kept_tasks: PositiveInt = 10_000
    """Ended tasks beyond this number are forgotten, the oldest first."""
    model_timeout_s: PositiveFloat = 600.0
    """Deadline of one call to a registered endpoint."""
    envelope: Literal["bare", "data", "nested"] = "bare"
    """How answers are wrapped: deployments differ, and clients must read them all."""
    receipt_enabled: bool = False
    """Serve GET /tasks/{task_id}/receipt."""
    faults: FaultPlan = FaultPlan()
    faults_file: str = ""
    """TOML or JSON file with a FaultPlan, instead of `faults`."""


def load_config(path: Path) -> ArenaServerConfig:
    """Read and check a config file, TOML or JSON.

    Raises:
        ArenaConfigError: The file can't be read, or a setting is unknown or out of bounds.
    """
    try:
        decode = msgspec.json.decode if path.suffix == ".json" else msgspec.toml.decode
        config = decode(path.read_bytes(), type=ArenaServerConfig)
    except (OSError, msgspec.MsgspecError) as error:
        raise ArenaConfigError(f"{path}: {error}") from error
    return checked(config)


def checked(config: ArenaServerConfig) -> ArenaServerConfig:
    """Resolve the fault file and check what types alone can't.

    Raises:
        ArenaConfigError: Names the path, what was found and what is allowed.
    """
    if not _is_loopback(config.host):
        raise ArenaConfigError(f"host: found {config.host!r}, expected a loopback address such as 127.0.0.1")
    published = [f"{h.key}@{h.version}" for h in config.harnesses]
    _unique("harnesses", published)
    _unique("streams", [s.stream_id for s in config.streams])
    for i, stream in enumerate(config.streams):
        if stream.harness not in published:
            raise ArenaConfigError(f"streams[{i}].harness: found {stream.harness!r}, expected one of {published}")
        if not stream.turns or len(stream.turns) > stream.max_turns:
            allowed = f"1 to max_turns = {stream.max_turns}"
            raise ArenaConfigError(f"streams[{i}].turns: found {len(stream.turns)} turns, expected {allowed}")
    for i, harness in enumerate(config.harnesses):
        if harness.kind is HarnessKind.COMMAND and not harness.command:
            raise ArenaConfigError(f"harnesses[{i}].command: found none, expected a program and its arguments")
        if not math.isfinite(harness.timeout_s):
            raise ArenaConfigError(f"harnesses[{i}].timeout_s: found {harness.timeout_s}, expected a finite number")
    if not config.faults_file:
        return config
    return msgspec.structs.replace(config, faults=_load_faults(Path(config.faults_file)), faults_file="")


def secret_from_env(name: str) -> str:
    """A secret named by its environment variable.

    Raises:
        ArenaConfigError: The variable is unset or empty.
    """
    value = os.environ.get(name, "")
    if not value:
        raise ArenaConfigError(f"environment variable {name} is not set: the local Arena needs it to check its callers")
    return value


def _load_faults(path: Path) -> FaultPlan:
    decode = msgspec.json.decode if path.suffix == ".json" else msgspec.toml.decode
    try:
        return decode(path.read_bytes(), type=FaultPlan)
    except (OSError, msgspec.MsgspecError) as error:
        raise ArenaConfigError(f"faults_file {path}: {error}") from error


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _unique(path: str, names: list[str]) -> None:
    for name in names:
        if names.count(name) > 1:
            raise ArenaConfigError(f"{path}: found {name!r} {names.count(name)} times, expected each once")
