from __future__ import annotations

import socket
import sys

import anyio
import psutil
import pytest

from broker.embedded import EmbeddedServer

KEYS = {
    "steps",
    "reward_by_step",
    "groups",
    "episodes",
    "dead_letters",
    "staleness",
    "trained_rows",
    "unexplained",
    "seconds",
}


async def test_one_command_runs_the_whole_loop_and_accounts_for_every_group(headrace) -> None:
    async with headrace("--steps", "3") as run:
        result = await run.result()
        children = run.children()
    assert result.keys() >= KEYS
    assert result["steps"] == 3
    assert len(result["reward_by_step"]) == 3
    assert set(result["groups"]) == {"issued", "trained", "dropped", "open"}
    assert result["groups"]["trained"] == 12
    assert result["groups"]["issued"] == sum(result["groups"][key] for key in ("trained", "dropped", "open"))
    assert result["episodes"]["ended"] >= 48
    assert (result["unexplained"], result["doubled"], result["dead_letters"]) == (0, 0, 0)
    assert result["staleness"]["max"] <= result["staleness"]["bound"] == 1
    assert children == {}


async def test_an_interrupted_run_is_resumed_by_the_same_command(headrace, tmp_path) -> None:
    slow = ("--set", "training.standin_step_s=0.3")
    async with headrace("--steps", "6", *slow) as run:
        await run.wait_for_step(2)
        assert run.folder.is_ready(run.process.pid)
        pids = [child.pid for child in run.children().values()]
        run.interrupt()
        assert await run.process.wait() == 130
        assert b'"steps":' in run.stdout
        assert not any(psutil.pid_exists(pid) for pid in pids)
        assert not run.folder.ready_file.exists()
    async with headrace("--steps", "6", folder=tmp_path / "run") as run:
        result = await run.result()
    assert result["steps"] == 6
    assert (result["unexplained"], result["doubled"]) == (0, 0)
    assert result["groups"]["trained"] == 24


@pytest.mark.nightly
async def test_a_second_signal_ends_a_run_whose_broker_answers_nothing_and_all_its_processes(
    headrace, wait_until
) -> None:
    async with headrace("--steps", "50", "--set", "training.standin_step_s=0.3") as run:
        await run.wait_for_step(1)
        children = run.children()
        children["nats"].suspend()
        run.interrupt()
        run.process.terminate()
        with anyio.fail_after(20):
            assert await run.process.wait() in (130, 143)
        await wait_until(lambda: not any(_lives(child) for child in children.values()))
    assert b"ended at once by a second signal" in run.stderr


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


async def test_every_kind_of_process_may_be_killed_while_it_runs(headrace, wait_until) -> None:
    async with headrace("--steps", "14", "--set", "training.standin_step_s=0.3") as run:
        for step, kind in enumerate(("gateway", "stages", "trainer", "arena", "nats"), start=1):
            await run.wait_for_step(step)
            victim = run.children()[kind]
            victim.kill()
            await wait_until(lambda k=kind, v=victim: run.children().get(k, v).pid != v.pid)
        result = await run.result()
    assert result["steps"] == 14
    assert (result["unexplained"], result["doubled"]) == (0, 0)
    assert result["groups"]["trained"] == 56


async def test_a_second_run_in_the_same_folder_is_refused(headrace, tmp_path) -> None:
    async with headrace("--steps", "50", "--set", "training.standin_step_s=0.3") as run:
        await run.wait_for_step(1)
        async with headrace("--steps", "1", folder=tmp_path / "run") as second:
            assert await second.process.wait() == 1
        assert b"it is in use (pid" in second.stderr
        assert second.stderr.count(b"\n") == 1


@pytest.mark.parametrize(
    ("setting", "text"),
    [
        ("sampling.group_per_step=4", b"sampling.group_per_step: unknown key; did you mean 'groups_per_step'?"),
        ("sampling.groups_per_step=many", b"sampling.groups_per_step: Expected `int`, got `str`"),
        (
            "training.backend=tourch",
            b"training.backend: expected one of torch, fsdp2, megatron, standin, found 'tourch'",
        ),
        ("policy.folder=/nowhere", b"headrace: policy.folder: /nowhere lacks"),
        ("broker.url=ftp://x", b"broker.url: expected embedded, nats://host:port"),
        ("engine.script=nowhere:nothing", b"engine.script: expected package.module:function that can be imported in"),
    ],
)
async def test_bad_settings_are_one_clear_line_and_nothing_is_left(headrace, setting: str, text: bytes) -> None:
    async with headrace("--set", setting) as run:
        assert await run.process.wait() == 1
        assert text in run.stderr, run.stderr.decode()
        assert run.children() == {}
    assert b"Traceback" not in run.stderr


async def test_a_worker_that_dies_at_start_ends_the_run_with_its_last_lines(headrace) -> None:
    script = "asyncio.windows_events:SelectorEventLoop"  # is there, and can't be imported
    async with headrace("--set", f"engine.script={script}") as run:
        assert await run.process.wait() == 1
        assert run.children() == {}
    assert b"gateway ended (exit code 78)" in run.stderr
    assert f"can't import {script!r}".encode() in run.stderr


def _taken_port() -> socket.socket:
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    return listener


async def test_a_missing_server_binary_is_one_clear_line(headrace) -> None:
    async with headrace("--set", "broker.server_binary=/nowhere/nats-server") as run:
        assert await run.process.wait() == 1
    assert run.stderr.decode().strip().splitlines()[-1].startswith("headrace: ")
    assert b"/nowhere/nats-server" in run.stderr
    assert b"Traceback" not in run.stderr


async def test_a_taken_server_port_is_one_clear_line(headrace) -> None:
    with _taken_port() as listener:
        port = listener.getsockname()[1]
        async with headrace("--set", f"broker.server_port={port}") as run:
            assert await run.process.wait() == 1
            assert run.children() == {}
    assert str(port).encode() in run.stderr
    assert b"Traceback" not in run.stderr


async def test_a_taken_gateway_port_ends_the_run_by_name(headrace) -> None:
    with _taken_port() as listener:
        port = listener.getsockname()[1]
        async with headrace("--set", f"gateway.port={port}") as run:
            assert await run.process.wait() == 1
            assert run.children() == {}
    assert b"gateway ended" in run.stderr
    assert b"ddress already in use" in run.stderr


async def test_a_locked_store_is_one_clear_line(headrace, tmp_path) -> None:
    server = EmbeddedServer(tmp_path / "run" / "nats")
    await server.start()
    try:
        async with headrace() as run:
            assert await run.process.wait() == 1
    finally:
        await server.stop()
    assert b"is in use by" in run.stderr
    assert b"Traceback" not in run.stderr


async def test_a_disk_with_too_little_room_is_told_before_anything_starts(headrace) -> None:
    async with headrace("--set", f"run.min_free_disk_bytes={2**60}") as run:
        assert await run.process.wait() == 1
        assert run.children() == {}
    assert b"disk full" in run.stderr
    assert run.stderr.count(b"\n") == 1


async def test_an_undecodable_message_becomes_a_dead_letter_and_the_loop_goes_on(headrace) -> None:
    async with headrace("--steps", "6", "--set", "training.standin_step_s=0.2") as run:
        await run.wait_for_step(1)
        async with run.broker() as broker:
            for topic in ("group.issued.bad", "episode.ended.bad.0.0", "trajectory.ready.bad.0"):
                await broker.publish(f"hr.{broker.run}.{topic}", b"\xff\x00")
        result = await run.result()
    assert result["steps"] == 6
    # group.issued is read by fan-out and by assembly, episode.ended by reward mapping, trajectory.ready by assembly
    assert result["dead_letters"] == 4
    assert result["unexplained"] == 0


async def test_down_stops_a_run_by_its_folder_in_good_order(headrace) -> None:
    async with headrace("--steps", "1000") as run:
        await run.wait_for_step(1)
        command = [sys.executable, "-m", "ops", "down", str(run.folder.path)]
        with anyio.fail_after(60):
            told = await anyio.run_process(command)
            assert await run.process.wait() == 130
        assert f"run smoke: told to leave: pid {run.process.pid}" in told.stdout.decode()
        assert run.children() == {}
