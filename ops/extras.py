"""The extras of this project that a config needs, and whether their packages are there: told before anything starts."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Final

from ops.arena_access import LOCAL, uses_arena
from ops.config import RunConfig
from schemas.config import EngineKind
from schemas.errors import ConfigError

_TRAIN_MODULES: Final = ("torch", "transformers", "safetensors")


def needs_torch(config: RunConfig) -> bool:
    """Whether the built-in engine or a trainer with a model runs."""
    return config.training.backend != "standin" or config.engine.kind is EngineKind.BUILTIN


def needed_extras(config: RunConfig) -> list[str]:
    """Names of the extras without which the run does not start."""
    broker = config.broker
    needed = {
        "train": needs_torch(config),
        "arena": config.arena.url == LOCAL and uses_arena(config),
        "auth": bool(broker.creds_file or broker.nkey_seed_file),
        "rabbitmq": broker.url.startswith(("amqp://", "amqps://")),
        "metrics": bool(config.metrics.port),
    }
    return [name for name, is_needed in needed.items() if is_needed]


def check_torch_is_there(config: RunConfig) -> None:
    """Look for what makes and trains the policy, without importing it.

    Raises:
        ConfigError: it is not installed; the text says how to get it, and what runs without.
    """
    if not needs_torch(config):
        return
    missing = [name for name in _TRAIN_MODULES if find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"training.backend = {config.training.backend}, engine.kind = {config.engine.kind.value}: expected the extra `train`, "
            f"found no {', '.join(missing)}: pip install 'headrace[train]'; without it run engine.kind = scripted with "
            "training.backend = standin, as examples/smoke.toml does"
        )
