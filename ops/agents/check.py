"""Whether a run's agents can be loaded, asked before anything starts and in the processes that will play them."""

from __future__ import annotations

from collections.abc import Mapping

import anyio
import msgspec

from ops.agents.pool import open_pool
from ops.agents.runner import ADAPTERS, agent_program
from schemas.config_arena import ArenaSettings, StreamConfig
from schemas.errors import ConfigError


async def check_agents(streams: Mapping[str, StreamConfig], arena: ArenaSettings) -> None:
    """Load each agent once.

    Raises:
        ConfigError: The first that can't be loaded, and why.
    """
    for stream in streams.values():
        if stream.runner not in ADAPTERS:
            continue
        program = msgspec.structs.replace(agent_program(stream, arena), num_processes=1)
        try:
            async with open_pool(program) as pool:
                await pool.warm()
        except* ConfigError as group:
            raise first_of(group) from None


def first_of(group: BaseExceptionGroup[ConfigError]) -> ConfigError:
    """The first error of a group of groups."""
    first = group.exceptions[0]
    return first_of(first) if isinstance(first, BaseExceptionGroup) else first


def check_agents_now(streams: Mapping[str, StreamConfig], arena: ArenaSettings) -> None:
    """The same, outside of an event loop."""
    anyio.run(check_agents, streams, arena)
