from __future__ import annotations

import os
from pathlib import Path

import anyio
import msgspec
import pytest

from broker.memory import MemoryBroker, MemoryServer
from ops.nodes.asking import NodeReply, NodeState, node_subject, say_gone, say_here
from ops.nodes.roll import NodeCalls, NodePresence, node_lines, say_nodes
from ops.slurm import job_states


@pytest.fixture
def broker() -> MemoryBroker:
    return MemoryBroker(MemoryServer(), "r")


def serve(broker: MemoryBroker, node: str):
    """Answers as a node's supervisor does."""

    async def answer(_data: bytes) -> bytes:
        return msgspec.msgpack.encode(NodeReply(state=NodeState(node=node)))

    return broker.serve(node_subject("r", node), answer)


async def test_a_run_on_one_machine_has_no_nodes(broker) -> None:
    await say_here(broker, NodeState(node="main"))
    assert await node_lines(broker) == []


async def test_every_node_of_the_topology_is_told_with_what_became_of_it(broker) -> None:
    await say_nodes(broker, ["head", "gpu-1", "gpu-2", "gpu-3"])
    for node in ("head", "gpu-1", "gpu-2", "added"):
        await say_here(broker, NodeState(node=node, address=f"at-{node}"))
    await say_gone(broker, "gpu-1")
    async with serve(broker, "head"), serve(broker, "added"):
        lines = await node_lines(broker)
    assert [(line.node, line.presence) for line in lines] == [
        ("head", NodePresence.UP),
        ("gpu-1", NodePresence.LEFT),
        ("gpu-2", NodePresence.GONE),
        ("gpu-3", NodePresence.AWAITED),
        ("added", NodePresence.UP),
    ]
    assert lines[2].address == "at-gpu-2"


async def test_a_node_that_does_not_answer_for_too_long_is_gone_until_it_comes_back(broker, wait_until) -> None:
    for node in ("head", "gpu-1"):
        await say_here(broker, NodeState(node=node))
    calls = NodeCalls(broker, silent_after_s=0.5)
    async with serve(broker, "head"), anyio.create_task_group() as tasks:
        tasks.start_soon(calls.run)
        await wait_until(lambda: calls.gone() == ["gpu-1"])
        async with serve(broker, "gpu-1"):
            await wait_until(lambda: calls.gone() == [])
        await wait_until(lambda: calls.gone() == ["gpu-1"])
        await say_gone(broker, "gpu-1")
        await wait_until(lambda: calls.gone() == [])
        tasks.cancel_scope.cancel()


async def test_what_slurm_says_of_a_job_is_told_and_a_silent_slurm_is_nothing(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    sacct = tmp_path / "sacct"
    sacct.write_text('#!/bin/sh\necho "4711|COMPLETED"\necho "4712|CANCELLED by 1000"\necho "9|FAILED"\n')
    sacct.chmod(0o755)
    assert await job_states({"4711", "4712", "", "not a job"}) == {"4711": "COMPLETED", "4712": "CANCELLED"}
    sacct.write_text("#!/bin/sh\nexit 1\n")
    assert await job_states({"4711"}) == {}
    assert await job_states(set()) == {}
