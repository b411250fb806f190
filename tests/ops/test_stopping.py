"""The first signal asks for an orderly end, a second one forces it, whatever the program still waits for.

nats-io/nats.py#373: a client that drains for ever must not keep its process alive against a second Ctrl-C.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import anyio.abc
import psutil
import pytest
from waiting import wait_until

from broker.api import Broker
from broker.connect import connect
from broker.embedded import EmbeddedServer
from broker.recording import Recording
from ops.config import load_config
from ops.logtools.record import record_run
from ops.run_folder import Endpoints, RunFolder
from pipeline.log import RunLog
from pipeline.metrics import report_subject
from schemas.messages.sampling import Tick
from schemas.topics import PROMPT_PUBLISHED

ROOT = Path(__file__).parents[2]
FORCED = "ended at once by a second signal"
PROGRAM = """
import anyio
from ops.stopping import until_stopped
async def main():
    asked = anyio.Event()
    async with until_stopped(asked.set, on_force=lambda: print("children killed", flush=True)):
        print("ready", flush=True)
        await asked.wait()
        print("draining", flush=True)
        if {hangs}:
            with anyio.CancelScope(shield=True):
                await anyio.sleep_forever()
anyio.run(main)
"""


@asynccontextmanager
async def program(*command: str) -> AsyncGenerator[anyio.abc.Process]:
    process = await anyio.open_process(
        [sys.executable, *command], cwd=ROOT, stdin=subprocess.DEVNULL, start_new_session=True
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        with anyio.CancelScope(shield=True):
            await process.aclose()


async def _lines_until(process: anyio.abc.Process, wanted: bytes) -> None:
    text = b""
    while wanted not in text:
        text += await process.stdout.receive()


async def _end(process: anyio.abc.Process) -> tuple[int, str]:
    """Exit code and stderr."""
    with anyio.fail_after(30):
        code = await process.wait()
        return code, b"".join([chunk async for chunk in process.stderr]).decode()


async def test_one_signal_lets_the_program_finish() -> None:
    async with program("-c", PROGRAM.format(hangs=False)) as process:
        await _lines_until(process, b"ready")
        process.send_signal(signal.SIGINT)
        assert await _end(process) == (0, "")


@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM])
async def test_a_second_signal_of_either_kind_ends_a_program_that_hangs(second: signal.Signals) -> None:
    async with program("-c", PROGRAM.format(hangs=True)) as process:
        await _lines_until(process, b"ready")
        process.send_signal(signal.SIGINT)
        await _lines_until(process, b"draining")
        process.send_signal(second)
        await _lines_until(process, b"children killed")
        code, text = await _end(process)
        assert code == 128 + second
        assert FORCED in text


@asynccontextmanager
async def _silent(server: EmbeddedServer) -> AsyncGenerator[None]:
    """The broker hears and answers nothing meanwhile."""
    frozen = psutil.Process(server.pid)
    frozen.suspend()
    try:
        yield
    finally:
        frozen.resume()


@pytest.fixture(scope="module")
def broker_server(tmp_path_factory):
    """A broker with a run of a few hundred prompts on it."""
    server = EmbeddedServer(tmp_path_factory.mktemp("nats"))
    anyio.run(server.start)
    anyio.run(_fill, server)
    yield server
    anyio.run(server.stop)


async def _fill(server: EmbeddedServer) -> None:
    async with connect(server.url, "r", server.connect_settings(), create=True) as broker:
        for number in range(300):
            await RunLog(broker).publish(Tick(ordinal=number, period_s=1.0, unix_time_s=0.0))


@pytest.fixture
def folder(broker_server: EmbeddedServer, tmp_path: Path) -> str:
    """The folder of a run on that broker."""
    run = RunFolder(tmp_path / "run")
    run.create()
    run.write_endpoints(Endpoints(run="r", broker_url=broker_server.url, broker_login=broker_server.connect_settings()))
    run.write_config(load_config(ROOT / "examples" / "own_agent.toml", ["run.id=r", f"run.dir={run.path}"]))
    return str(run.path)


@asynccontextmanager
async def at_work(name: str, folder: str, server: EmbeddedServer) -> AsyncGenerator[anyio.abc.Process]:
    """A command of headrace, seen to do its work."""
    async with connect(server.url, "r", server.connect_settings()) as broker:
        commands = {
            "record": ["record", folder, "-o", f"{folder}/a.hrrec", "--quiet"],
            "tap": ["tap", ">", "--run", folder, "--from-start"],
            "publish": ["publish", "prompts", f"{folder}/rows.jsonl", "--stream", "s", "--run", folder, "--rate", "20"],
            "worker": ["worker", "fan_out", "--run-dir", folder],
            "replay": ["replay", f"{folder}/first.hrrec", "--url", server.url, "--run", "again", "--speed", "1"],
        }
        if name == "publish":
            await anyio.Path(folder, "rows.jsonl").write_text("".join(f'"prompt {i} {folder}"\n' for i in range(5000)))
        if name == "replay":
            await record_run(broker, f"{folder}/first.hrrec", follow=False)
            commands["replay"] += ["--token-file", server.connect_settings().token_file]
        async with program("-m", "ops", *commands[name]) as process:
            await _seen(name, process, broker, folder, server)
            yield process


async def _seen(name: str, process: anyio.abc.Process, broker: Broker, folder: str, server: EmbeddedServer) -> None:
    """Return when the command's work has begun."""

    async def has_begun() -> bool:
        assert process.returncode is None, (await _end(process))[1]
        match name:
            case "record":
                path = anyio.Path(folder, "a.hrrec")
                return await path.exists() and (await path.stat()).st_size > 4096
            case "publish":
                async with broker.read([PROMPT_PUBLISHED.filter("r")], follow=False) as records:
                    return any([folder.encode() in record.data async for record in records])
            case _:
                async with connect(server.url, "again", server.connect_settings(), create=True) as again:
                    return (await again.log_status()).last_sequence > 0

    with anyio.fail_after(60):
        if name == "tap":
            await _lines_until(process, b"fold.tick")
        elif name == "worker":
            await _report_of(process, broker)
        else:
            await wait_until(has_begun, name, deadline_s=60, every_s=0.05)


async def _report_of(process: anyio.abc.Process, broker: Broker) -> None:
    async with broker.listen(report_subject("r", "fan_out")) as reports:
        while process.returncode is None:
            with anyio.move_on_after(0.5):
                await anext(aiter(reports))
                return
    raise AssertionError((await _end(process))[1])


COMMANDS = ["record", "tap", "publish", "worker", "replay"]


@pytest.mark.nightly
@pytest.mark.parametrize("name", COMMANDS)
async def test_one_signal_ends_a_command_in_order(name: str, folder: str, broker_server: EmbeddedServer) -> None:
    async with at_work(name, folder, broker_server) as process:
        process.send_signal(signal.SIGINT)
        code, text = await _end(process)
    assert code == (130 if name in ("publish", "replay") else 0), text
    assert FORCED not in text
    if name == "record":
        with Recording(Path(folder, "a.hrrec")) as recording:
            assert recording.complete
            assert recording.num_messages >= 300


@pytest.mark.nightly
@pytest.mark.parametrize("name", COMMANDS)
async def test_a_second_signal_ends_a_command_whose_broker_answers_nothing(
    name: str, folder: str, broker_server: EmbeddedServer
) -> None:
    async with at_work(name, folder, broker_server) as process, _silent(broker_server):
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGTERM)
        code, text = await _end(process)
    # Whichever of the two comes last ends it: by the handler, or, where the first one's work is done, by the system's own.
    assert code in (128 + signal.SIGINT, 128 + signal.SIGTERM, -signal.SIGINT, -signal.SIGTERM) or name == "tap", text
