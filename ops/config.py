"""A whole config file: TOML → frozen structs, with `--set a.b=c` on top, all of it checked before anything starts.

An unknown key, a wrong type or a value that can't work is one ConfigError: the key's path, what was found, what is
allowed.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from ops.config_imports import check_imports
from ops.config_ranges import check_values
from ops.config_shape import check_keys, convert
from ops.engines.commands import SERVER_KINDS
from ops.engines.plan import check_engine, has_servers
from ops.training_checks import check_training
from schemas.config import (
    BrokerSection,
    EngineSection,
    GatewaySection,
    MetricsSection,
    PolicySection,
    RetentionSection,
    RewardSection,
    RolloutSection,
    RunSection,
    SamplingSection,
    TrainingSection,
    WatchdogSection,
)
from schemas.config_arena import ArenaSettings, StreamConfig, given_streams, resolve_streams
from schemas.errors import ConfigError, InvalidIdError
from schemas.ids import check_run_id
from schemas.payload import digest
from stages.assembly.settings import AssemblySettings, check_settings
from stages.assembly.stall import StallSettings
from stages.sampling.evaluation import EvaluationStream
from stages.sampling.open_streams import OpenStreamSettings
from stages.sampling.settings import SamplingSettings

# Fields of AssemblySettings that other sections decide.
DERIVED: Final = frozenset({"run", "groups_per_step", "slots_per_group", "max_staleness", "temperature"})


_NEVER: Final = 2**31


class RunConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A whole config file."""

    run: RunSection = RunSection()
    streams: list[StreamConfig] = []
    broker: BrokerSection = BrokerSection()
    arena: ArenaSettings = ArenaSettings()
    local_arena: dict[str, Any] = {}  # Any: TOML of ops.arena, decoded strictly there
    """[local_arena]: the local Arena's streams and harnesses, when `arena.url` is `local` and no `arena.local_config` names a file."""
    sampling: SamplingSection = SamplingSection()
    rollout: RolloutSection = RolloutSection()
    engine: EngineSection = EngineSection()
    gateway: GatewaySection = GatewaySection()
    reward: RewardSection = RewardSection()
    assembly: dict[str, Any] = {}  # Any: decoded strictly into AssemblySettings by `assembly_settings`
    """[assembly]: groups, filters, estimator, aggregation: the fields of AssemblySettings."""
    loss: dict[str, Any] = {}  # Any: decoded strictly into LossConfig where torch is
    """[loss]: the policy loss: the fields of LossConfig."""
    policy: PolicySection = PolicySection()
    training: TrainingSection = TrainingSection()
    metrics: MetricsSection = MetricsSection()
    retention: RetentionSection = RetentionSection()
    watchdog: WatchdogSection = WatchdogSection()


def load_config(path: str | Path, overrides: Sequence[str] = (), *, with_imports: bool = True) -> RunConfig:
    """Read, override, check.

    Args:
        with_imports: the user's functions that it names must be there, too. False where the run's workers may be elsewhere.

    Raises:
        ConfigError: the first thing that can't be used.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: expected a readable config file, found: {error.strerror}") from error
    try:
        tree = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from error
    if "nodes" in tree:
        raise ConfigError(f"{path}: expected a run's config, found a topology of nodes: `headrace up` starts its nodes")
    for override in overrides:
        apply_override(tree, override)
    config = _with_streams(decode_config(tree))
    if with_imports:
        check_imports(config.streams, config.engine, config.gateway, assembly_settings(config).user_filters)
    return config


def _with_streams(config: RunConfig) -> RunConfig:
    """Streams of a file or a variable become the config's own: what a run was begun with is known to all who read its folder,
    its log or a recording, on whatever machine.
    """
    streams = given_streams(config.streams, config.arena, os.environ)
    arena = msgspec.structs.replace(config.arena, streams_file="", streams_env="")
    return msgspec.structs.replace(config, streams=list(streams), arena=arena)


def decode_config(tree: Mapping[str, Any]) -> RunConfig:  # Any: a parsed TOML tree
    """The config of a parsed tree.

    Raises:
        ConfigError: see the module.
    """
    check_keys(tree, RunConfig, "")
    config = convert(tree, RunConfig, "")
    check_config(config)
    return config


def check_config(config: RunConfig) -> None:
    """What no single field can say.

    Raises:
        ConfigError: settings that contradict each other or can't work.
    """
    try:
        check_run_id(config.run.id)
    except InvalidIdError as error:
        raise ConfigError(f"run.id: {error}") from error
    streams = list(run_streams(config).values())
    check_values(msgspec.structs.replace(config, streams=streams), "")
    check_values(assembly_settings(config), "assembly")
    _at_least("sampling.max_concurrent_groups", config.sampling.max_concurrent_groups, config.sampling.groups_per_step)
    _at_least("rollout.max_context_tokens", config.rollout.max_context_tokens, config.rollout.max_new_tokens + 1)
    _check_retention(config.retention)
    _check_sizes(config)
    check_engine(config.engine)
    if config.run.from_run and config.run.rollout_only:
        raise ConfigError("run.from_run trains from another run's rollouts, run.rollout_only trains nothing: keep one")
    if config.run.from_run and config.loss.get("proximal") == "loglinear":
        raise ConfigError(
            "loss.proximal = loglinear interpolates between this run's weight versions; rows of another run (run.from_run) "
            "have none of them: expected recompute, reuse_train or none"
        )
    if all(stream.evaluate_every_versions for stream in run_streams(config).values()):
        raise ConfigError("streams: found evaluation streams only, expected one without evaluate_every_versions")
    _check_open_streams(config)
    estimator = assembly_settings(config).estimator.name
    check_training(config.training, estimator=estimator, steps=config.run.steps)


def _check_open_streams(config: RunConfig) -> None:
    streams = [stream for stream in run_streams(config).values() if not stream.evaluate_every_versions]
    if not any(stream.open for stream in streams):
        return
    if config.run.epochs is not None:
        raise ConfigError("run.epochs: an open stream has no epochs; expected run.steps, or neither")
    listed = [stream.name for stream in streams if not stream.open]
    if not listed and config.sampling.epoch_size_groups:
        raise ConfigError("sampling.epoch_size_groups: found open streams only, which have no epochs; expected 0")
    if listed and config.run.rollout_only and config.run.steps is None:
        raise ConfigError(
            f"run.rollout_only: streams {', '.join(listed)} go round without end beside an open stream; expected run.steps"
        )


def _check_retention(retention: RetentionSection) -> None:
    shares = (retention.purge_above, retention.sampling_resumes_at, retention.sampling_stops_at)
    if not 0 < shares[1] < shares[2] <= 1 or not 0 < shares[0] <= 1:
        raise ConfigError(
            "retention: expected 0 < sampling_resumes_at < sampling_stops_at <= 1 and 0 < purge_above <= 1, found "
            f"sampling_resumes_at = {shares[1]}, sampling_stops_at = {shares[2]}, purge_above = {shares[0]}"
        )


def _check_sizes(config: RunConfig) -> None:
    """Sizes that must fit each other."""
    epoch, groups = config.sampling.epoch_size_groups, config.sampling.groups_per_step
    if epoch % groups:
        raise ConfigError(
            f"sampling.epoch_size_groups: expected 0 or a multiple of sampling.groups_per_step ({groups}), found {epoch}"
        )
    heads = config.policy.num_heads
    if not config.policy.folder and heads % max(1, heads // 2):
        raise ConfigError(f"policy.num_heads: expected an even number, 1 or 3 (two heads share a key), found {heads}")
    if config.engine.count is not None and not has_servers(config.engine):
        raise ConfigError(
            f"engine.count: is for servers, and engine.kind = {config.engine.kind.value} has none: expected engine.kind = "
            f"{' or '.join(SERVER_KINDS)}, or no engine.count"
        )


def run_streams(config: RunConfig) -> dict[str, StreamConfig]:
    """The run's streams by name, from wherever the config says they are.

    Raises:
        ConfigError: none, several places, or one that can't be used.
    """
    return {stream.name: stream for stream in resolve_streams(config.streams, config.arena, os.environ)}


def fold_digest(config: RunConfig) -> str:
    """Digest of everything that the folds' outputs depend on: it must not change within a run. The stall rule ends runs
    and changes no output, so that a run it ended can go on with another one.
    """
    assembly = msgspec.structs.replace(assembly_settings(config), stall=StallSettings())
    settings: list[object] = [sampling_settings(config), assembly]
    if config.run.from_run:
        settings.append("from_run")
    return digest(msgspec.json.encode(settings, order="deterministic"))


def assembly_settings(config: RunConfig) -> AssemblySettings:
    """[assembly] with what other sections decide.

    Raises:
        ConfigError: an unknown key, or settings that can't work.
    """
    section = config.assembly
    for key in section:
        if key in DERIVED:
            raise ConfigError(f"assembly.{key}: is decided by [run], [sampling] or [rollout]; set it there")
    check_keys(section, AssemblySettings, "assembly", leave_out=DERIVED)
    tree = {
        # Without training groups are closed and never make a step.
        "groups_per_step": _NEVER if config.run.rollout_only else config.sampling.groups_per_step,
        "slots_per_group": config.sampling.slots_per_group,
        "max_staleness": staleness_bound(config),
        "temperature": config.rollout.temperature,
        "run": config.run.id,
    }
    if config.loss.get("proximal") == "reuse_train":  # exact for one mini-batch a step only
        section = {key: value for key, value in section.items() if key != "mini_batch_groups"}
    return check_settings(convert({**section, **tree}, AssemblySettings, "assembly"))


def staleness_bound(config: RunConfig) -> int | None:
    """How stale a trained row may be; None = any. Rows of another run carry that run's versions."""
    return config.run.from_run_max_staleness if config.run.from_run else config.sampling.max_staleness


def sampling_settings(config: RunConfig) -> SamplingSettings:
    """What the sampling fold depends on."""
    sampling, streams = config.sampling, run_streams(config)
    return SamplingSettings(
        streams=tuple(
            name for name, stream in streams.items() if not stream.evaluate_every_versions and not stream.open
        ),
        open_streams=tuple(
            OpenStreamSettings(name=name, weight=stream.sampling_weight, when_empty=stream.when_empty)
            for name, stream in streams.items()
            if stream.open
        ),
        groups_per_step=sampling.groups_per_step,
        slots_per_group=sampling.slots_per_group,
        max_staleness=sampling.max_staleness,
        max_concurrent_groups=sampling.max_concurrent_groups,
        order="quota" if sampling.order == "quota" else "smallest_next",
        epoch_size_groups=sampling.epoch_size_groups,
        seed=config.run.seed if sampling.shuffle else None,
        group_deadline_s=sampling.group_deadline_s,
        tick_period_s=sampling.tick_period_s,
        trains=not config.run.rollout_only,
        evaluations=tuple(
            EvaluationStream(name=name, every_versions=stream.evaluate_every_versions, slots=stream.evaluation_slots)
            for name, stream in streams.items()
            if stream.evaluate_every_versions
        ),
    )


def apply_override(tree: dict[str, Any], override: str) -> None:  # Any: a TOML tree
    """Put one `a.b=c` into a tree. The value is read as TOML, and as a plain string where that fails.

    Raises:
        ConfigError: no `=`, or a path through something that is no table.
    """
    path, equals, text = override.partition("=")
    keys = path.strip().split(".")
    if not equals or not all(keys):
        raise ConfigError(f"--set {override}: expected a.b=value")
    try:
        value: object = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    node: Any = tree
    for depth, key in enumerate(keys[:-1]):
        node = _descend(node, key, ".".join(keys[: depth + 1]), override)
    if isinstance(node, list):
        items: list[Any] = node
        items[_index(keys[-1], items, path, override)] = value
    elif isinstance(node, dict):
        node[keys[-1]] = value
    else:
        raise ConfigError(f"--set {override}: {'.'.join(keys[:-1])} is no table")


def _descend(node: Any, key: str, path: str, override: str) -> Any:
    if isinstance(node, list):
        items: list[Any] = node
        return items[_index(key, items, path, override)]
    if isinstance(node, dict):
        table: dict[str, Any] = node
        return table.setdefault(key, {})
    raise ConfigError(f"--set {override}: {path} is no table")


def _index(key: str, items: list[Any], path: str, override: str) -> int:
    """Position in a list of tables: a number, or the `name` of one."""
    for position, item in enumerate(items):
        if isinstance(item, dict) and item.get("name") == key:
            return position
    if key.isdecimal() and int(key) < len(items):
        return int(key)
    raise ConfigError(f"--set {override}: {path} names none of the {len(items)} tables")


def _at_least(path: str, value: float | None, least: int) -> None:
    if value is not None and value < least:
        raise ConfigError(f"{path}: expected at least {least}, found {value}")
