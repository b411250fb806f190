"""Agents are loaded once before a run starts, so that one that can't be says so at once."""

import os
from pathlib import Path

import pytest

from ops.agents.check import check_agents
from schemas.config_arena import ArenaSettings, StreamConfig, StreamRunner
from schemas.errors import ConfigError


def _stream(agent: str) -> StreamConfig:
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    envs = {"PYTHONPATH": path}
    return StreamConfig(name="s", stream_id="s", runner=StreamRunner.FUNCTION, agent=agent, task_envs=envs)


async def test_agents_that_can_be_loaded_pass() -> None:
    arena_stream = StreamConfig(name="a", stream_id="a")
    await check_agents({"s": _stream("example_agents:told"), "a": arena_stream}, ArenaSettings())


async def test_one_that_cannot_be_loaded_is_named_with_the_reason() -> None:
    with pytest.raises(ConfigError, match=r"streams\.s\.agent: 'no_such_module:f' can't be run: ModuleNotFoundError"):
        await check_agents({"s": _stream("no_such_module:f")}, ArenaSettings())
