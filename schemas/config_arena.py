"""The parts of a run's config that concern an Arena: its address, its streams, its time limits.

Secrets are named by environment variable and never stand here.
"""

from __future__ import annotations

import base64
import binascii
import math
import re
from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any

import msgspec

from schemas.errors import ConfigError

_STREAM_NAME = re.compile(r"[A-Za-z0-9_.-]+")
_HARNESS = re.compile(r"[^@\s]+@[^@\s]+")
_IMPORT_PATH = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


class LlmProtocol(StrEnum):
    """What a harness speaks to the model."""

    ANTHROPIC = "anthropic"
    RESPONSES = "responses"
    CHAT_COMPLETIONS = "chat_completions"


class ArenaRoute(StrEnum):
    """How a harness in the Arena reaches our gateway."""

    SESSION_GATEWAY = "session_gateway"
    """One registration per gateway and Arena; sessions are told apart by headers."""
    GATEWAY = "gateway"
    """One registration per episode."""
    DIRECT = "direct"
    """Our own address in the harness's environment, no registration."""


class StreamRunner(StrEnum):
    """Who runs a stream's episodes."""

    ARENA = "arena"
    FUNCTION = "function"
    """The user's own async function, in a process pool."""
    VERIFIERS = "verifiers"
    """A verifiers environment."""
    ONLINE = "online"
    """The user's own service: it opens sessions over HTTP, works, and sets their rewards."""


class WhenEmpty(StrEnum):
    """What happens when an open stream's turn comes and nobody has published a row."""

    PASS = "pass"
    """The turn passes to the other streams and is not owed later; passed turns are counted."""
    WAIT = "wait"
    """The other streams wait: the weights hold exactly."""


class RewardRef(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One version of a reward."""

    key: str
    version: str


class StreamConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[[streams]]: one stream of tasks."""

    name: str
    """Our name for it in weights, metrics and audit: letters, digits, '_', '.', '-'."""
    stream_id: str
    """The Arena's id; for other runners an id of the user's own."""
    sampling_weight: float = 1.0
    """Finite and > 0; only ratios matter."""
    runner: StreamRunner = StreamRunner.ARENA
    agent: str = ""
    """Other runners: import path `package.module:function` of an async function, or the id of a verifiers taskset."""
    agent_args: dict[
        str, Any
    ] = {}  # Any: keyword arguments of a user's function, or a verifiers environment's settings
    """Other runners: further keyword arguments of the function, or the verifiers environment's own settings. Texts that are called
    like a secret are shown nowhere (docs/operating.md)."""
    agent_processes: int = 1
    """Other runners: processes that play the stream's episodes, many at a time each."""
    agent_timeout_s: float = 600.0
    """Other runners: of one episode."""
    agent_python: str = ""
    """Other runners: interpreter of the processes, where the agent needs packages of its own; empty: this one."""
    rows: str = ""
    """Other runners: where the stream's rows come from, as `headrace publish prompts` takes them (a .jsonl file …), but with
    no field that is left out there; empty: they are published. For a verifiers taskset the number of its tasks, empty: all. For an online stream whose service brings tasks of
    its own: the number of groups that make an epoch.
    """
    open: bool = False
    """Its rows are drawn as they are published, once each, instead of from a list that is read or closed before."""
    when_empty: WhenEmpty = WhenEmpty.PASS
    """Open streams: `pass`, or `wait` for prompts when its turn comes."""
    claim_deadline_s: float = 1800.0
    """Online: a slot that no session claimed for so long, counted from its group's issue or latest claim, ends unclaimed."""
    reward_deadline_s: float = 600.0
    """Online: a session that has no reward so long after its end is not trained on, and its slot waits for another one."""
    harness: str = ""
    """"key@version"; empty takes the stream's own default."""
    llm_protocol: LlmProtocol | None = None
    """None: by the harness key ("claude": anthropic, "codex": responses, else chat completions)."""
    task_envs: dict[str, str] = {}
    """Environment of the harness; goes before the common one. No value of it is shown anywhere."""
    expected_reward_ref: RewardRef | None = None
    """The reward that must score it; another one stops the launch."""
    reward_threshold: float | None = None
    reward_transform: str = ""
    """Import path `package.module:function` of `transform(score, row[, threshold]) -> float`."""
    evaluate_every_versions: int = 0
    """> 0: an evaluation stream, run every so many weight versions and never trained on."""
    evaluation_slots: int = 1
    """Rollouts of each of its rows."""


class ArenaSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[arena]: the Arena and how it is called."""

    url: str = "local"
    """Base URL without `/openapi/v1`; `local` starts the local Arena beside the run."""
    local_config: str = ""
    """TOML file of the local Arena; empty serves the quickstart's two streams."""
    token_env: str = "ARENA_OPENAPI_TOKEN"
    """Environment variable with the control plane's token."""
    llm_api_key_env: str = "ARENA_LLM_API_KEY"
    """Environment variable with the model gateway's key."""
    route: ArenaRoute = ArenaRoute.SESSION_GATEWAY
    harness: str = ""
    """For streams that name none."""
    task_envs: dict[str, str] = {}
    """Environment of all harnesses; a stream's own goes before it."""
    streams_file: str = ""
    """Streams from a TOML or JSON file with a `streams` list, instead of inline."""
    streams_env: str = ""
    """Environment variable with the same, base64-encoded, instead of inline."""
    task_timeout_s: float = 1800.0
    """From launch to terminal result, build and boot included."""
    request_timeout_s: float = 60.0
    registration_timeout_s: float = 180.0
    poll_interval_s: float = 5.0
    request_retries: int = 3
    probe_interval_s: float = 60.0
    """How often a registration in use is renewed."""
    cleanup_timeout_s: float = 10.0
    receipt_path: str = ""
    """Path of a HARNESS_FAILED task's own receipt, such as /tasks/{task_id}/receipt; empty asks for none."""
    min_terminal_tasks: int = 1
    """Preflight: fewer ended tasks among the last 100 make a stream unhealthy."""
    max_failure_rate: float = 0.8
    """Preflight: a failure rate of this or more makes a stream unhealthy."""
    max_raw_bytes: int = 65536
    """Larger grader objects are left out of the audit."""


def protocol_of(harness_key: str, configured: LlmProtocol | None = None) -> LlmProtocol:
    """The protocol of a harness: as configured, else by its key."""
    if configured is not None:
        return configured
    key = harness_key.partition("@")[0].lower()
    if "claude" in key:
        return LlmProtocol.ANTHROPIC
    return LlmProtocol.RESPONSES if "codex" in key else LlmProtocol.CHAT_COMPLETIONS


def resolve_streams(
    inline: Sequence[StreamConfig], settings: ArenaSettings, environ: Mapping[str, str]
) -> tuple[StreamConfig, ...]:
    """The run's streams from the one place that gives them, checked, common settings filled in.

    Raises:
        ConfigError: Several places give streams, none does, or one of them can't be used.
    """
    return check_streams(
        [
            msgspec.structs.replace(
                stream, harness=stream.harness or settings.harness, task_envs={**settings.task_envs, **stream.task_envs}
            )
            for stream in given_streams(inline, settings, environ)
        ]
    )


def given_streams(
    inline: Sequence[StreamConfig], settings: ArenaSettings, environ: Mapping[str, str]
) -> Sequence[StreamConfig]:
    """The streams as they stand in the one place that gives them.

    Raises:
        ConfigError: Several places give streams, none does, or it can't be read.
    """
    places = {
        "streams": bool(inline),
        "arena.streams_file": bool(settings.streams_file),
        "arena.streams_env": bool(settings.streams_env),
    }
    given = [place for place, used in places.items() if used]
    if len(given) != 1:
        raise ConfigError(f"streams: found {given or 'none'}, expected exactly one of {list(places)}")
    if settings.streams_file:
        return _from_file(settings.streams_file)
    if settings.streams_env:
        return _from_env(settings.streams_env, environ)
    return inline


def check_streams(streams: Sequence[StreamConfig]) -> tuple[StreamConfig, ...]:
    """Check what types alone can't.

    Raises:
        ConfigError: Starts with the path of the bad key.
    """
    if not streams:
        raise ConfigError("streams: found none, expected at least one")
    for i, stream in enumerate(streams):
        _check_stream(f"streams[{i}]", stream)
    for key, values in (("name", [s.name for s in streams]), ("stream_id", [s.stream_id for s in streams])):
        for i, value in enumerate(values):
            if value in values[:i]:
                raise ConfigError(
                    f"streams[{i}].{key}: {value!r} is used by streams[{values.index(value)}] too; expected unique"
                )
    return tuple(streams)


def _check_stream(path: str, stream: StreamConfig) -> None:
    if not _STREAM_NAME.fullmatch(stream.name):
        raise ConfigError(f"{path}.name: found {stream.name!r}, expected letters, digits, '_', '.' or '-'")
    if not stream.stream_id.strip():
        raise ConfigError(f"{path}.stream_id: found {stream.stream_id!r}, expected the Arena's id of the stream")
    if not (math.isfinite(stream.sampling_weight) and stream.sampling_weight > 0):
        raise ConfigError(f"{path}.sampling_weight: found {stream.sampling_weight}, expected a finite number > 0")
    if stream.harness and not _HARNESS.fullmatch(stream.harness):
        raise ConfigError(f'{path}.harness: found {stream.harness!r}, expected "key@version"')
    ref = stream.expected_reward_ref
    if ref is not None and not (ref.key.strip() and ref.version.strip()):
        raise ConfigError(
            f"{path}.expected_reward_ref: found key {ref.key!r}, version {ref.version!r}, expected both or none"
        )
    if stream.reward_threshold is not None and not math.isfinite(stream.reward_threshold):
        raise ConfigError(f"{path}.reward_threshold: found {stream.reward_threshold}, expected a finite number")
    if stream.reward_transform and not _IMPORT_PATH.fullmatch(stream.reward_transform):
        raise ConfigError(
            f"{path}.reward_transform: found {stream.reward_transform!r}, expected package.module:function"
        )
    if any(not name for name in stream.task_envs):
        raise ConfigError(f"{path}.task_envs: found an empty name, expected names of environment variables")
    _check_runner(path, stream)
    if stream.evaluate_every_versions < 0 or stream.evaluation_slots < 1:
        raise ConfigError(f"{path}.evaluate_every_versions: expected 0 or more, and evaluation_slots 1 or more")


def _check_runner(path: str, stream: StreamConfig) -> None:
    if stream.runner is StreamRunner.ONLINE:
        _check_online(path, stream)
    elif stream.runner is not StreamRunner.ARENA and not stream.agent:
        raise ConfigError(f"{path}.agent: found none, expected one for runner {stream.runner.value!r}")
    if stream.runner is StreamRunner.FUNCTION and not _IMPORT_PATH.fullmatch(stream.agent):
        raise ConfigError(f"{path}.agent: found {stream.agent!r}, expected package.module:function")
    if stream.runner is StreamRunner.ARENA and (stream.rows or stream.agent):
        raise ConfigError(
            f"{path}.rows, .agent: an Arena has the tasks and plays them; expected none, or another runner"
        )
    if stream.runner is StreamRunner.VERIFIERS and stream.rows and not (stream.rows.isdecimal() and int(stream.rows)):
        raise ConfigError(
            f"{path}.rows: found {stream.rows!r}, expected a number of the taskset's tasks, or none for all"
        )
    opens = (StreamRunner.FUNCTION, StreamRunner.ONLINE)
    if stream.open and (stream.runner not in opens or stream.rows or stream.evaluate_every_versions):
        raise ConfigError(
            f"{path}.open: expected runner 'function' or 'online', no rows and no evaluate_every_versions: an open stream's rows are "
            "published while the run goes on"
        )
    if stream.agent_processes < 1:
        raise ConfigError(f"{path}.agent_processes: found {stream.agent_processes}, expected at least 1")
    if not (math.isfinite(stream.agent_timeout_s) and stream.agent_timeout_s > 0):
        raise ConfigError(f"{path}.agent_timeout_s: found {stream.agent_timeout_s}, expected a finite number > 0")


def _check_online(path: str, stream: StreamConfig) -> None:
    if stream.agent:
        raise ConfigError(f"{path}.agent: the user's own service plays an online stream; expected none")
    if stream.rows.isdecimal() and (not int(stream.rows) or stream.evaluate_every_versions):
        raise ConfigError(
            f"{path}.rows: found {stream.rows}, expected at least one group an epoch, or the tasks themselves: an evaluation "
            "stream needs tasks to hand out"
        )
    for name, seconds in (("claim", stream.claim_deadline_s), ("reward", stream.reward_deadline_s)):
        if not (math.isfinite(seconds) and seconds > 0):
            raise ConfigError(f"{path}.{name}_deadline_s: found {seconds}, expected a finite number > 0")


class _StreamList(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    streams: list[StreamConfig]


def _from_file(name: str) -> list[StreamConfig]:
    path = Path(name).expanduser()
    try:
        text = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"arena.streams_file: can't read {path}: {error.strerror}") from error
    return _decoded(text, f"arena.streams_file {path}")


def _from_env(name: str, environ: Mapping[str, str]) -> list[StreamConfig]:
    value = environ.get(name, "")
    if not value:
        raise ConfigError(f"arena.streams_env: environment variable {name} is not set")
    try:
        text = base64.b64decode(value, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ConfigError(f"arena.streams_env: {name} holds no valid base64") from error
    return _decoded(text, f"arena.streams_env {name}")


def _decoded(text: bytes, place: str) -> list[StreamConfig]:
    start = text.lstrip()[:1]
    try:
        if start == b"{":
            return msgspec.json.decode(text, type=_StreamList).streams
        return msgspec.toml.decode(text, type=_StreamList).streams
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{place}: {error}; expected TOML [[streams]] tables or JSON with a 'streams' list"
        ) from error
