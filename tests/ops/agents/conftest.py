"""A pool of processes that play the example agents."""

import os
import sys
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest

from ops.agents.pool import AgentCall, AgentProgram, open_pool

HERE = Path(__file__).parent


@pytest.fixture
def open_agent(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(HERE), *sys.path])

    @asynccontextmanager
    async def open_agent(function: str = "told", **changes):
        program = AgentProgram(name="s", agent=f"example_agents:{function}", envs=dict(os.environ), **changes)
        async with open_pool(program) as pool:
            yield pool

    return open_agent


@pytest.fixture
def play():
    async def play(pool, task, *, session="s", timeout_s=60.0, over=None):
        call = AgentCall(task=task, base_url="http://gateway/v1", api_key="secret-token", session=session)
        return await pool.play(call, timeout_s=timeout_s, over=over or anyio.Event())

    return play
