"""How this run's workers reach its Arena."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from ops.config import RunConfig, run_streams
from ops.run_folder import Endpoints
from schemas.config_arena import StreamRunner

if TYPE_CHECKING:
    from stages.clients.arena.client import ArenaAccess

LOCAL: str = "local"


def arena_access(config: RunConfig, endpoints: Endpoints, environ: Mapping[str, str] = os.environ) -> ArenaAccess:
    """Address and credentials (from the environment) of the run's Arena.

    Raises:
        ConfigError: a credential's environment variable is not set.
    """
    # Imported by who calls an Arena: every worker asks whether there is one, and an HTTP client weighs 15 MB.
    from stages.clients.arena.client import ArenaAccess  # noqa: PLC0415 - see above
    from stages.clients.arena.secret import secret_from  # noqa: PLC0415 - see above

    arena = config.arena
    return ArenaAccess(
        base_url=(endpoints.arena_url if arena.url == LOCAL else arena.url).rstrip("/"),
        token=secret_from(environ, arena.token_env),
        llm_api_key=secret_from(environ, arena.llm_api_key_env),
        request_timeout_s=arena.request_timeout_s,
        registration_timeout_s=arena.registration_timeout_s,
        request_retries=arena.request_retries,
    )


def uses_arena(config: RunConfig) -> bool:
    """Whether an Arena plays any of the run's streams."""
    return any(stream.runner is StreamRunner.ARENA for stream in run_streams(config).values())
