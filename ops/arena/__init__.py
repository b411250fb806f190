"""The local Arena: the whole Arena API on loopback, with real tasks, harness processes and planned faults.

It is the far side of the client's contract tests and the default Arena of a first run; it shares no code with the client.
Read `server.py` first. Public: `serve`, `ArenaServerConfig` and its parts, `load_config`, `quickstart_config`.
"""

from ops.arena.config import (
    ArenaConfigError,
    ArenaServerConfig,
    CallFault,
    CallName,
    EpisodeFault,
    FaultPlan,
    HarnessKind,
    HarnessSpec,
    StreamSpec,
    load_config,
)
from ops.arena.quickstart import quickstart_config
from ops.arena.server import ArenaSecrets, serve

__all__ = [
    "ArenaConfigError",
    "ArenaSecrets",
    "ArenaServerConfig",
    "CallFault",
    "CallName",
    "EpisodeFault",
    "FaultPlan",
    "HarnessKind",
    "HarnessSpec",
    "StreamSpec",
    "load_config",
    "quickstart_config",
    "serve",
]
