"""The node that controls, with the broker and the trainer, dies and comes back; the others have waited for it."""

from __future__ import annotations

import json
import shutil

import anyio
import psutil
import pytest
from alive import lives
from certificates import Authority
from nodes_case import Nodes
from topologies import head, rollout_node, topology

from ops.nodes.asking import nodes_of
from ops.run_folder import RunFolder
from ops.status import run_status
from ops.wiring import STAGES
from pipeline.log import RunLog
from schemas.topics import RUN_STARTED, SESSION_OPENED

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(300)]

SETTINGS = ("training.standin_step_s=0.5",)
TOPOLOGY = topology(head(), rollout_node(1), settings=SETTINGS)
TLS = """tls_cert_file = "tls/{{node}}.crt"
tls_key_file = "tls/{{node}}.key"
tls_ca_file = "tls/ca.crt"
tls_verify_clients = true
"""


async def until_up(run: Nodes) -> None:
    await run.up("head")
    await run.until_keys()
    await run.up("rollout-1")
    await run.until_ready("head", "rollout-1")


async def test_the_run_goes_on_when_its_control_node_was_killed_twice_and_comes_back(nodes, wait_until) -> None:
    run = nodes("control", 60, TOPOLOGY)
    with anyio.fail_after(280):
        await until_up(run)
        waiting = run.processes["rollout-1"].pid
        for step in (3, 12):
            await run.until_step(step)
            children = psutil.Process(run.processes["head"].pid).children(recursive=True)
            run.kill("head")
            await wait_until(lambda: not any(lives(child.pid) for child in children))  # noqa: B023 - awaited at once
            await run.processes["head"].wait()
            assert psutil.pid_exists(waiting)
            await run.up("head")
            await run.until_ready("head")
        async with run.broker() as broker:
            assert set(await nodes_of(broker)) == {"head", "rollout-1"}
            assert [line.presence for line in (await run_status(broker, STAGES)).nodes] == ["up", "up"]
            async with RunLog(broker).read([RUN_STARTED, SESSION_OPENED], follow=False) as entries:
                starts = [entry.message async for entry in entries if entry.topic.name == RUN_STARTED.name]
        assert [start.ordinal for start in starts] == [0, 1, 2]
        result = await run.result()
        assert await run.processes["rollout-1"].wait() == 0, run.said("rollout-1")
    assert (result["steps"], result["unexplained"], result["doubled"], result["dead_letters"]) == (60, 0, 0, 0)
    assert result["groups"]["trained"] == 240


async def test_a_node_that_died_is_told_by_its_name(nodes, wait_until) -> None:
    run = nodes("gone", 5000, TOPOLOGY + rollout_node(2, "launchers = 1"))
    with anyio.fail_after(200):
        await until_up(run)
        await run.until_step(1)
        run.kill("rollout-1")

        async def told() -> bool:
            status = json.loads(await run.headrace("status", str(run.file), "--json"))
            troubles = [(one["kind"], one["what"]) for one in status["troubles"]]
            return ("node gone", "rollout-1") in troubles

        await wait_until(told, deadline_s=60.0)
        status = json.loads(await run.headrace("status", str(run.file), "--json"))
        assert [(one["node"], one["presence"]) for one in status["nodes"]] == [
            ("head", "up"),
            ("rollout-1", "gone"),
            ("rollout-2", "not here"),
        ]
        assert "head" not in [one["what"] for one in status["troubles"]]  # though it has the same host
        shown = " ".join((await run.headrace("status", str(run.file))).split())
        assert "nodes head up, rollout-1 gone, rollout-2 not here" in shown

        async def said_by_watchdog() -> bool:
            return "a node is gone" in run.said("head")

        await wait_until(said_by_watchdog, deadline_s=60.0)
        await run.up("rollout-1")
        await run.until_ready("rollout-1")

        async def forgotten() -> bool:
            status = json.loads(await run.headrace("status", str(run.file), "--json"))
            return not any(one["kind"] == "node gone" for one in status["troubles"])

        await wait_until(forgotten, deadline_s=60.0)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the test's certificates")
async def test_nodes_talk_to_a_server_with_tls_and_certificates_of_their_own(nodes, tmp_path) -> None:
    authority = Authority(tmp_path / "tls")
    for node, address in (("head", "127.0.0.2"), ("rollout-1", "127.0.0.3")):
        authority.sign(node, address)
    run = nodes("secure", 60, topology(head(), rollout_node(1), settings=SETTINGS, broker=TLS))
    with anyio.fail_after(200):
        await until_up(run)
        assert RunFolder(tmp_path / "secure" / "head").read_endpoints().broker_url.startswith("tls://")
        status = json.loads(await run.headrace("status", str(run.file), "--json"))
        assert [one["presence"] for one in status["nodes"]] == ["up", "up"]
        stranger = await run.headrace("status", "secure", "--url", f"nats://127.0.0.2:{run.port}", code=1)
        assert "CERTIFICATE_VERIFY_FAILED" in stranger
        result = await run.result()
        assert await run.processes["rollout-1"].wait() == 0, run.said("rollout-1")
    assert (result["steps"], result["unexplained"], result["dead_letters"]) == (60, 0, 0)
