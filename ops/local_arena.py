"""The local Arena's config of a run: from [local_arena], a file, or the quickstart's."""

from __future__ import annotations

from pathlib import Path

import msgspec

from ops.arena.config import ArenaConfigError, ArenaServerConfig, checked, load_config
from ops.arena.quickstart import quickstart_config
from ops.config import RunConfig
from ops.config_shape import check_keys
from schemas.errors import ConfigError


def local_arena_config(config: RunConfig) -> ArenaServerConfig:
    """What the run's local Arena serves.

    Raises:
        ConfigError: a setting of it can't be used.
    """
    try:
        if config.arena.local_config:
            return load_config(Path(config.arena.local_config))
        if not config.local_arena:
            return quickstart_config()
        check_keys(config.local_arena, ArenaServerConfig, "local_arena")
        return checked(msgspec.convert(config.local_arena, ArenaServerConfig))
    except (ArenaConfigError, msgspec.ValidationError) as error:
        raise ConfigError(f"local_arena: {error}") from error
