"""Whether a run on a broker of its own goes on is told by its processes and its log, not by the broker's answer."""

from __future__ import annotations

import os
import sys
import time
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import anyio
import msgspec
import pytest
from topologies import ROLLS_OUT, head

from broker.connect import connect
from broker.embedded import embedded_server
from ops.connection import find_run, look_at_run
from ops.run_folder import Endpoints, RunFolder, RunFolderError
from pipeline.log import RunLog
from pipeline.presence import PresenceLease
from schemas.messages.sampling import RunFinished, RunStarted

ROOT = Path(__file__).parents[2]


def started(ordinal: int) -> RunStarted:
    return RunStarted(ordinal=ordinal, config_json=b"{}", config_digest="", headrace_version="0")


@pytest.fixture
async def run(tmp_path):
    """A run's folder and its log on a broker that goes on without it."""
    folder = RunFolder(tmp_path / "run")
    folder.create()
    async with (
        embedded_server(tmp_path / "server") as server,
        connect(server.url, "r", server.connect_settings(), create=True) as broker,
    ):
        login = server.connect_settings()
        folder.write_endpoints(Endpoints(run="r", broker_url=server.url, broker_login=login))
        await RunLog(broker).publish(started(0))
        yield folder, broker


async def is_running(folder: RunFolder) -> bool:
    async with look_at_run(str(folder.path)) as opened:
        return opened.is_running


async def test_a_run_goes_on_as_long_as_somebody_holds_its_folder(run) -> None:
    folder, _ = run
    with folder.lock():
        assert await is_running(folder)
    assert not await is_running(folder)


async def test_a_node_goes_on_as_long_as_a_process_of_the_run_is_there(run) -> None:
    folder, broker = run
    folder.write_endpoints(msgspec.structs.replace(folder.read_endpoints(), node="rollout-1"))
    assert not await is_running(folder)
    lease = PresenceLease(broker, "trainer.other.0", ["trainer"], now=time.time)
    await lease.renew()
    assert await is_running(folder)
    await lease.leave()
    assert not await is_running(folder)


@asynccontextmanager
async def by_url(folder: RunFolder):
    async with look_at_run("r", url=folder.read_endpoints().broker_url) as opened:
        yield opened


async def test_by_its_brokers_address_a_run_is_over_when_its_latest_start_has_finished_and_nobody_is_there(
    run, monkeypatch
) -> None:
    folder, broker = run
    monkeypatch.setattr("ops.connection.connect_to", same(broker))
    log = RunLog(broker)
    async with by_url(folder) as opened:
        assert opened.is_running
    await log.publish(RunFinished(ordinal=0, steps=3, reason="steps"))
    async with by_url(folder) as opened:
        assert not opened.is_running
    await log.publish(started(1))
    async with by_url(folder) as opened:
        assert opened.is_running


def same(broker):
    """A connection that stands already: the server of this test wants a token."""

    @asynccontextmanager
    async def connect_to(endpoints, *, name, deadline_s=None):
        yield broker

    return connect_to


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("tap", "run", "--from-start", "--run"), "run.finished"),
        (("status",), "not running; this is what its log holds"),
        (("status", "--json"), '"is_running":false'),
    ],
    ids=["tap", "status", "status --json"],
)
async def test_commands_say_that_it_is_over_and_end(run, arguments: tuple[str, ...], told: str) -> None:
    folder, broker = run
    await RunLog(broker).publish(RunFinished(ordinal=0, steps=3, reason="steps"))
    with anyio.fail_after(60):
        done = await anyio.run_process([sys.executable, "-m", "ops", *arguments, str(folder.path)])
    assert told in done.stdout.decode()


def test_a_process_that_has_the_number_of_the_former_holder_holds_nothing(tmp_path) -> None:
    folder = RunFolder(tmp_path)
    assert folder.holder() is None
    with folder.lock():
        assert folder.holder() == os.getpid()
    assert (tmp_path / "run.lock").read_text()  # this process lives on
    assert folder.holder() is None


def test_who_gives_a_folder_up_is_ready_no_more(tmp_path) -> None:
    folder = RunFolder(tmp_path)
    with suppress(ZeroDivisionError), folder.lock():
        folder.say_ready()
        assert folder.is_ready(os.getpid())
        raise ZeroDivisionError
    assert not folder.ready_file.exists()


def test_who_only_looks_at_a_folder_leaves_what_another_process_said(tmp_path) -> None:
    folder = RunFolder(tmp_path)
    folder.ready_file.write_text("1")
    with folder.lock():
        assert folder.is_ready(1)
    assert folder.is_ready(1)


def test_the_newest_run_of_several_nodes_is_looked_at_where_its_log_is(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    for age_s, node in enumerate(("rollout-1", "head", "rollout-2")):
        folder = RunFolder(Path("runs") / "cluster" / node)
        folder.create()
        folder.write_endpoints(Endpoints(run="cluster", node=node, broker_url="nats://127.0.0.2:4222"))
        os.utime(folder.endpoints_file, (age_s, age_s))
    assert find_run(None).path.name == "rollout-2"
    (Path("runs") / "cluster" / "head" / "nats").mkdir()
    assert find_run(None).path.name == "head"


def test_a_node_that_waits_for_its_control_node_is_told_as_one(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(ROOT)
    topology = tmp_path / "topology.toml"
    config = f'config = "{ROOT / "examples/smoke.toml"}"\nset = ["run.dir={tmp_path / "run"}"]\n'
    topology.write_text(config + head(*ROLLS_OUT))
    with pytest.raises(RunFolderError, match="no node of it was started on this machine"):
        find_run(str(topology))
    folder = RunFolder(tmp_path / "run" / "head")
    folder.create()
    with folder.lock(), pytest.raises(RunFolderError, match=rf"node head \(pid {os.getpid()}\) waits on this machine"):
        find_run(str(topology))
