# ruff: noqa: SIM117 - a server and what is done with it read better apart
from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import sys
from pathlib import Path

import anyio
import msgspec
import pytest
import structlog

from broker.conformance.asserting import wait_until
from broker.connect import connect
from broker.embedded import EmbeddedServer, EmbeddedSettings, embedded_server, find_binary
from broker.errors import NotConnectedError, PublishTimeoutError, ServerStartError, StoreLockedError
from broker.settings import ConnectSettings

ORPHAN = """
import asyncio, os, sys
from broker.embedded import EmbeddedServer
server = EmbeddedServer(sys.argv[1])
asyncio.run(server.start())
print("PID", server.pid, flush=True)
sys.stdin.read()
"""


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


async def test_it_listens_on_the_loopback_only_and_wants_its_token(own_server, run):
    assert own_server.url.startswith("nats://127.0.0.1:")
    with pytest.raises(NotConnectedError, match=r"can't connect.*uthorization|refused these credentials"):
        async with connect(own_server.url, run, ConnectSettings(connect_deadline_s=3), create=True):
            pass
    async with connect(own_server.url, run, own_server.connect_settings(), create=True) as broker:
        assert (await broker.publish(f"hr.{run}.a.b.1", b"x")).created


async def test_its_secret_is_readable_by_its_owner_only_and_in_no_output(tmp_path, run):
    with structlog.testing.capture_logs() as logs:
        async with embedded_server(tmp_path / "s") as server:
            token = server.token_file.read_text()
            async with connect(server.url, run, server.connect_settings(), create=True):
                shown = f"{server.url} {server.connect_settings()} {logs}"
            for name in ("token", "nats-server.conf"):
                assert stat.S_IMODE((server.store / name).stat().st_mode) == 0o600
            assert token not in (server.store / "nats-server.log").read_text()
    assert token not in shown


async def test_a_second_server_on_the_same_store_is_refused_and_says_who_has_it(own_server):
    with pytest.raises(StoreLockedError, match=rf"in use by nats-server {own_server.pid} on {own_server.url}"):
        await EmbeddedServer(own_server.store).start()
    assert alive(own_server.pid)


async def test_it_keeps_its_port_over_restart_kill_and_a_new_start(tmp_path):
    server = EmbeddedServer(tmp_path / "s")
    await server.start()
    url, pid = server.url, server.pid
    await server.restart()
    assert (server.url, server.pid != pid) == (url, True)
    await server.kill()
    assert (server.pid, server.returncode) == (0, -signal.SIGKILL)
    await server.start()
    assert server.url == url
    await server.stop()
    async with embedded_server(tmp_path / "s") as again:
        assert again.url == url


async def test_after_stop_the_store_is_free_and_the_process_gone(tmp_path):
    server = EmbeddedServer(tmp_path / "s")
    await server.start()
    pid = server.pid
    await server.stop()
    assert not alive(pid)
    async with embedded_server(tmp_path / "s"):
        pass


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the death signal is Linux's")
async def test_it_dies_with_the_process_that_started_it(tmp_path):
    command = [sys.executable, "-c", ORPHAN, str(tmp_path / "s")]
    async with await anyio.open_process(command, stdin=subprocess.PIPE, cwd=Path(__file__).parents[2]) as parent:
        assert parent.stdout is not None
        with anyio.fail_after(30):
            words = b""
            while b"PID" not in words or not words.endswith(b"\n"):
                words += await parent.stdout.receive()
        server_pid = int(words.rpartition(b"PID")[2])
        assert alive(server_pid)
        os.kill(parent.pid, signal.SIGKILL)
        await parent.wait()

    async def gone() -> bool:
        return not alive(server_pid)

    await wait_until(gone, "the server is gone")
    async with embedded_server(tmp_path / "s"):
        pass


async def test_a_port_that_is_taken_is_one_clear_line(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        server = EmbeddedServer(tmp_path / "s", EmbeddedSettings(port=port))
        with pytest.raises(ServerStartError, match="address already in use") as caught:
            await server.start()
    assert "\n" not in str(caught.value)
    await server.start()
    assert server.url == f"nats://127.0.0.1:{port}"
    await server.stop()


async def test_no_binary_is_one_clear_line(tmp_path, monkeypatch):
    with pytest.raises(ServerStartError, match=f"expected an executable nats-server at {tmp_path}/none, found none"):
        await EmbeddedServer(tmp_path / "s", EmbeddedSettings(binary=f"{tmp_path}/none")).start()
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ServerStartError, match="no nats-server: expected the package"):
        find_binary(package="no-such-package")


async def test_a_folder_that_cannot_be_written_is_one_clear_line(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ServerStartError, match=r"the store folder .*/file/s can't be written: Not a directory"):
        await EmbeddedServer(tmp_path / "file" / "s").start()


async def test_a_wrong_setting_ends_with_the_server_s_own_reason(tmp_path):
    server = EmbeddedServer(tmp_path / "s", EmbeddedSettings(sync_interval="sometimes"))
    with pytest.raises(ServerStartError, match=r"nats-server ended at once: .*sync_interval"):
        await server.start()


async def test_each_message_can_be_forced_to_disk(tmp_path, run):
    async with embedded_server(tmp_path / "s", EmbeddedSettings(sync_interval="always")) as server:
        async with connect(server.url, run, server.connect_settings(), create=True) as broker:
            assert (await broker.publish(f"hr.{run}.a.b.1", b"x")).created


async def test_messages_outlive_a_kill_and_a_new_start(tmp_path, run):
    server = EmbeddedServer(tmp_path / "s")
    await server.start()
    async with connect(server.url, run, server.connect_settings(), create=True) as broker:
        await broker.publish(f"hr.{run}.a.b.1", b"x")
        await server.kill()
    await server.stop()
    async with embedded_server(tmp_path / "s") as again:
        async with connect(again.url, run, again.connect_settings()) as broker:
            record = await broker.get(f"hr.{run}.a.b.1")
            assert record is not None
            assert record.data == b"x"


@pytest.fixture
def small_disk(tmp_path):
    """A folder on a file system of 12 MB."""
    folder = tmp_path / "small"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=12m", "tmpfs", str(folder)]
    mounted = subprocess.run(command, capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip(f"a small file system can't be mounted here: {mounted.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


async def test_a_full_disk_is_named_loses_nothing_and_is_over_after_room_and_a_restart(small_disk, run):
    filler = small_disk / "filler"
    filler.write_bytes(bytes(8 * 2**20))
    async with embedded_server(small_disk / "s") as server:
        settings = msgspec.structs.replace(server.connect_settings(), publish_deadline_s=1.0, request_timeout_s=0.5)
        async with connect(server.url, run, settings, create=True) as broker:
            stored = 0

            async def publish_for_ever() -> None:
                nonlocal stored
                while True:
                    await broker.publish(f"hr.{run}.a.b.{stored}", os.urandom(100_000))
                    stored += 1

            with pytest.raises(PublishTimeoutError, match="stores nothing: its disk may be full"):
                await publish_for_ever()
            assert "no space left on device" in server.disk_full()
            filler.unlink()
            await server.restart()
            assert server.disk_full() == ""
            assert (await broker.publish(f"hr.{run}.a.b.{stored}", b"x")).created
            assert (await broker.log_status()).num_messages == stored + 1
