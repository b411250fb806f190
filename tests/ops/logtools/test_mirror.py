"""Messages copied to a RabbitMQ: a team that only consumes gets each of them, also after the bridge died."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import aio_pika
import anyio
import pytest

from broker.conformance.asserting import fill
from broker.connect import connect
from broker.embedded import EmbeddedServer
from broker.local_rabbit import LocalRabbit
from broker.rabbitmq.mirror import RabbitMirror, routing_key
from ops.logtools.mirror import MirrorPosition, mirror_run
from ops.logtools.patterns import named_runs
from ops.run_folder import Endpoints, RunFolder


def test_a_long_subject_has_a_key_that_fits_and_stays_its_own():
    long = "hr.r.prompt.published." + "x" * 300
    assert len(routing_key(long)) <= 255
    assert routing_key(long) != routing_key(long + "y")
    assert routing_key(long).startswith("hr.r.prompt.published.")
    assert routing_key("hr.r.step.trained.1.1") == "hr.r.step.trained.1.1"


class Dying:
    """A target that is gone after some messages."""

    def __init__(self, dies_after: int) -> None:
        self.got: list[int] = []
        self.dies_after = dies_after

    async def publish_all(self, records) -> None:
        for record in records:
            if len(self.got) == self.dies_after:
                raise ConnectionError("gone")
            self.got.append(record.sequence)


@pytest.mark.parametrize("kept_in", ["log", "file"])
async def test_a_bridge_goes_on_where_it_was(kept_in, tmp_path):
    file = tmp_path / "position" if kept_in == "file" else None
    async with connect("memory://", "r") as broker:
        await fill(broker, "a.b", 600)
        first = Dying(300)
        position = MirrorPosition(broker, "headrace", ("hr.r.>",), file)
        with pytest.raises(ConnectionError):
            await mirror_run(broker, first, ("hr.r.>",), position, follow=False, on_copied=lambda *_: None)
        second = Dying(-1)
        copied = await mirror_run(broker, second, ("hr.r.>",), position, follow=False, on_copied=lambda *_: None)
        assert sorted({*first.got, *second.got}) == list(range(1, 601))
        assert copied == len(second.got) < 600
        assert await mirror_run(broker, second, ("hr.r.>",), position, follow=False, on_copied=lambda *_: None) == 0


def test_a_mirrors_place_is_its_servers_and_exchange_without_logins():
    urls = ["amqp://me:secret@b:5671/v", "amqp://a"]
    assert RabbitMirror(None, "team", urls).place == "amqp://a:5672 amqp://b:5671/v team"


async def test_a_run_on_another_broker_is_named_beside_it_or_in_the_patterns():
    assert named_runs(["hr.r.step.trained.>", "hr.r.group.closed.>", "hr.*.>", "step.trained"]) == ["r"]
    command = [sys.executable, "-m", "ops", "bridge", "step.trained"]
    command += ["--from", "nats://127.0.0.1:1", "--to", "amqp://127.0.0.1:1/"]
    done = await anyio.run_process(command, check=False)
    assert (done.returncode, b"--run ID" in done.stderr) == (1, True)


async def test_a_run_on_rabbitmq_is_named_by_its_folder():
    command = [sys.executable, "-m", "ops", "bridge", "hr.r.>"]
    command += ["--from", "amqp://127.0.0.1:1/", "--to", "amqp://127.0.0.1:1/"]
    done = await anyio.run_process(command, check=False)
    assert (done.returncode, b"r: expected the folder of a run on RabbitMQ" in done.stderr) == (1, True)


@pytest.mark.resources
async def test_the_command_copies_a_run_to_a_real_rabbitmq(tmp_path: Path):
    rabbit, nats = LocalRabbit(tmp_path / "rabbit"), EmbeddedServer(tmp_path / "nats")
    await rabbit.start()
    await nats.start()
    try:
        connection = await aio_pika.connect(rabbit.url)
        channel = await connection.channel()
        exchange = await channel.declare_exchange("headrace", "topic", durable=True)
        queue = await channel.declare_queue("team")
        await queue.bind(exchange, "hr.*.step.trained.#")
        async with connect(nats.url, "r", nats.connect_settings(), create=True) as broker:
            for number in range(5):
                await broker.publish(f"hr.r.step.trained.{number}.1", b"%d" % number)
                await broker.publish(f"hr.r.group.closed.g{number}", b"")
            folder = RunFolder(tmp_path / "run")
            folder.create()
            folder.write_endpoints(Endpoints(run="r", broker_url=nats.url, broker_login=nats.connect_settings()))
            password = tmp_path / "password"
            password.write_text("guest")
            command = [
                *(sys.executable, "-m", "ops", "bridge", "step.trained", "group.closed", "--run", str(folder.path)),
                *("--to", rabbit.url.replace("guest:guest@", "")),
                *("--user", "guest", "--password-file", str(password), "--until-end", "--json", "--quiet"),
            ]
            done = await anyio.run_process(command)
            assert json.loads(done.stdout) == {"copied": 10}
            again = await anyio.run_process(command)
            assert json.loads(again.stdout) == {"copied": 0}
            command[command.index("--to") + 1] = rabbit.url.replace("127.0.0.1", "localhost")
            elsewhere = await anyio.run_process(command)
            assert json.loads(elsewhere.stdout) == {"copied": 10}, "another server has none of them"
        async with asyncio.timeout(20):
            got = [await queue.get(timeout=10) for _ in range(5)]
        assert [message.body for message in got] == [b"0", b"1", b"2", b"3", b"4"]
        assert [message.headers["subject"] for message in got] == [f"hr.r.step.trained.{n}.1" for n in range(5)]
        await connection.close()
    finally:
        await nats.stop()
        rabbit.kill()
