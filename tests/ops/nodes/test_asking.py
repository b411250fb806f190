from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest

from broker.memory import MemoryBroker, MemoryServer
from ops.config import RunConfig, decode_config
from ops.nodes.asking import (
    NodeRefusedError,
    NodeRequest,
    NodeSilentError,
    answers,
    ask_node,
    nodes_of,
    say_gone,
    scales_of,
)
from ops.nodes.service import NodeProcesses, known_node
from ops.nodes.share import Share
from ops.run_folder import RunFolder
from ops.supervise.supervisor import Supervisor

CONFIG: RunConfig = decode_config({"streams": [{"name": "reverse", "stream_id": "reverse"}]})


@asynccontextmanager
async def node_of(broker: MemoryBroker, folder: Path, stopped: list[str]) -> AsyncGenerator[NodeProcesses]:
    """A node that has been given no process yet."""
    share = Share(node="rollout-1", control=False, trainer=False, counts={"rewards": 0})
    async with anyio.create_task_group() as tasks:
        processes = NodeProcesses(
            *(share, CONFIG, RunFolder(folder), {}, Supervisor(tasks), broker),
            address="10.0.0.2",
            on_stop=lambda: stopped.append("rollout-1"),
        )
        async with known_node(processes, broker):
            yield processes


async def test_a_node_is_listed_and_answers_while_it_runs(tmp_path) -> None:
    broker, stopped = MemoryBroker(MemoryServer(), "r"), []
    async with node_of(broker, tmp_path, stopped):
        assert (await nodes_of(broker))["rollout-1"].address == "10.0.0.2"
        assert await answers(broker, "rollout-1")
        await ask_node(broker, "rollout-1", NodeRequest(action="stop"))
        assert stopped == ["rollout-1"]
    assert await nodes_of(broker) == {}
    with pytest.raises(NodeSilentError, match="node rollout-1 of run r does not answer: is it up"):
        await ask_node(broker, "rollout-1", NodeRequest(action="ping"))


async def test_what_a_node_was_scaled_to_is_remembered_and_what_it_refuses_is_not(tmp_path) -> None:
    broker = MemoryBroker(MemoryServer(), "r")
    async with node_of(broker, tmp_path, []) as processes:
        state = await ask_node(broker, "rollout-1", NodeRequest(action="scale", stage="rewards", count=0))
        assert state.counts == {"rewards": 0}
        with pytest.raises(NodeRefusedError, match="node rollout-1: assembly can't be scaled: it is a fold"):
            await ask_node(broker, "rollout-1", NodeRequest(action="scale", stage="assembly", count=2))
        assert await scales_of(broker, "rollout-1") == {"rewards": 0}
        assert processes.state.counts == {"rewards": 0}


async def test_a_node_that_died_is_listed_until_somebody_says_that_it_is_gone(tmp_path) -> None:
    broker = MemoryBroker(MemoryServer(), "r")
    other = MemoryBroker(MemoryServer(), "other")
    async with node_of(broker, tmp_path, []):
        assert await nodes_of(other) == {}
        await say_gone(broker, "rollout-1")
        assert await nodes_of(broker) == {}
