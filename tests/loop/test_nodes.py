"""Three nodes on loopback addresses of one machine: each knows the topology, the config and the secrets, and has a folder of its own."""

from __future__ import annotations

import json
import os
import signal

import anyio
import anyio.abc
import psutil
import pytest
from topologies import ROLLS_OUT, head, rollout_node, topology

from ops.control import standing
from ops.nodes.asking import nodes_of

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(300)]

SLOW_STEPS = "training.standin_step_s=0.8"
TOPOLOGY = topology(head(), rollout_node(1), rollout_node(2), settings=(SLOW_STEPS,))
CLUSTER = topology(
    head(),
    rollout_node(1, "broker = true"),
    rollout_node(2, "broker = true", *ROLLS_OUT),
    settings=(SLOW_STEPS, "broker.max_bytes=100000000", "broker.max_payload_store_bytes=200000000"),
    broker="cluster_port = {cluster_port}\nmax_store_bytes = 4000000000",
)
"""Each node has a NATS server; the middle one has nothing else."""


async def test_a_rollout_node_joins_and_leaves_and_dies_while_the_run_goes_on(nodes) -> None:
    run = nodes("nodes", 90, TOPOLOGY)
    await run.up("head")
    with anyio.fail_after(240):
        await run.until_keys()
        await run.up("rollout-1")  # before there is anything to join
        await run.until_ready("head", "rollout-1")
        await run.until_step(2)

        await run.up("rollout-2")
        await run.until_ready("rollout-2")
        await run.until_session_at("rollout-2")
        run.processes["rollout-2"].send_signal(signal.SIGTERM)
        assert await run.processes["rollout-2"].wait() == 0, run.said("rollout-2")
        async with run.broker() as broker:
            assert set(await nodes_of(broker)) == {"head", "rollout-1"}
            left_at = (await broker.log_status()).last_sequence

        await run.up("rollout-2")
        await run.until_ready("rollout-2")
        await run.until_session_at("rollout-2", after=left_at)
        os.kill(run.processes["rollout-2"].pid, signal.SIGKILL)  # its workers die with it
        result = await run.result()
        assert await run.processes["rollout-1"].wait() == 0, run.said("rollout-1")
    assert result["steps"] == 90
    assert (result["unexplained"], result["doubled"], result["dead_letters"]) == (0, 0, 0)
    assert result["groups"]["trained"] == 360


async def test_nodes_are_scaled_leave_and_come_back_and_the_run_is_stopped_by_commands(
    nodes, wait_until, commands
) -> None:
    run = nodes("asked", 5000, TOPOLOGY)
    topology = str(run.file)
    await run.up("head")
    with anyio.fail_after(280):
        await run.until_ready("head")
        said = await run.headrace("up", topology, "--node", "rollout-1", "--detach")
        pid = int(said.partition("(pid ")[2].partition(")")[0])
        await run.until_step(1)

        assert "gateway: 2 on rollout-1" in await run.headrace("scale", "gateway=2", topology)
        refused = await run.headrace("scale", "sampling=2", topology, code=1)
        assert "sampling can't be scaled: it is a fold" in refused
        assert "rewards: 1 on head" in await run.headrace("scale", "rewards=1", topology)

        await run.headrace("down", topology, "--node", "rollout-1")
        await wait_until(lambda: not psutil.pid_exists(pid))
        async with run.broker() as broker:
            assert set(await nodes_of(broker)) == {"head"}

        said = await run.headrace("up", topology, "--node", "rollout-1", "--detach")
        pid = int(said.partition("(pid ")[2].partition(")")[0])
        workers = commands(psutil.Process(pid).children())
        assert sum("worker gateway" in line for _, line in workers) == 2  # as it was scaled
        await run.headrace("pause", topology)
        await run.headrace("resume", topology)

        assert "told to leave: head" in await run.headrace("down", topology)
        assert await run.processes["head"].wait() == 130, run.said("head")
        await wait_until(lambda: not psutil.pid_exists(pid))
    result = json.loads((run.folder / "asked.head.json").read_text().splitlines()[-1])
    assert (result["unexplained"], result["doubled"], result["dead_letters"]) == (0, 0, 0)


async def test_a_node_with_other_keys_or_settings_is_refused(nodes) -> None:
    run = nodes("refused", 5000, TOPOLOGY)
    await run.up("head")
    with anyio.fail_after(150):
        await run.until_ready("head")
        other = await run.headrace(
            *("up", str(run.file), "--node", "rollout-1", "--set", "sampling.groups_per_step=2"), code=1
        )
        assert "its config has other [sampling], [assembly] or stream settings than run 'refused'" in other
        keys = run.folder / "refused.secrets.json"
        changed = {**json.loads(keys.read_text()), "control_key": "another"}
        keys.write_text(json.dumps(changed))
        assert "differs from the control node's" in await run.headrace(
            "up", str(run.file), "--node", "rollout-1", code=1
        )


async def test_runs_on_one_broker_don_t_touch_each_other(nodes, headrace, tmp_path) -> None:
    first = nodes("first", 25, TOPOLOGY)
    await first.up("head")
    with anyio.fail_after(280):
        await first.until_ready("head")
        await first.up("rollout-1")
        place = (
            *("--set", f"broker.url=nats://127.0.0.2:{first.port}", "--set", "run.id=second"),
            *("--set", f"broker.token_file={tmp_path}/first/head/broker.token"),
        )
        async with headrace("--steps", "4", *place, folder=tmp_path / "second") as second:
            await second.wait_for_step(1)
            await first.headrace("pause", str(tmp_path / "second"))  # and no word of it reaches the first
            await first.until_step(8)
            await first.headrace("resume", str(tmp_path / "second"))
            theirs = await second.result()
        async with first.broker() as broker:
            assert (await standing(broker)).word == ""
            assert set(await nodes_of(broker)) == {"head", "rollout-1"}
        ours = await first.result()
    assert (theirs["run"], theirs["steps"], theirs["unexplained"], theirs["doubled"]) == ("second", 4, 0, 0)
    assert (ours["run"], ours["steps"], ours["unexplained"], ours["doubled"]) == ("first", 25, 0, 0)
    assert theirs["groups"]["trained"] == 16
    assert ours["groups"]["trained"] == 100


async def test_a_run_outlives_one_of_three_nodes_with_nats_servers(nodes) -> None:
    run = nodes("three", 40, CLUSTER)
    await run.up("head")
    with anyio.fail_after(280):
        await run.until_keys()
        await run.up("rollout-1")
        await run.up("rollout-2")
        await run.until_ready("head", "rollout-1", "rollout-2")
        await run.until_step(3)
        await run.until_dead("rollout-1")  # and its server with it
        await run.until_step(6)
        await run.up("rollout-1")
        await run.until_ready("rollout-1")
        result = await run.result()
        for node in ("rollout-1", "rollout-2"):
            assert await run.processes[node].wait() == 0, run.said(node)
    assert (result["steps"], result["unexplained"], result["doubled"], result["dead_letters"]) == (40, 0, 0, 0)
    assert result["groups"]["trained"] == 160
