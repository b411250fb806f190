"""Queues as RabbitMQ 3.10 leaves them where it is killed a moment after it made them: known, without a process or without a leader."""

from __future__ import annotations

import subprocess

import anyio
import pytest

from broker.api import ConsumerSettings
from broker.conformance.asserting import fill, take_and_ack
from broker.local_rabbit import LocalRabbit, find_server
from broker.rabbitmq.queues import work_queue

pytestmark = pytest.mark.resources
WITHOUT_PROCESS = "ok = ra:stop_server(quorum_queues, {{'%2F_{queue}', node()}})."
WITHOUT_LEADER = """
    Id = {{'%2F_{queue}', node()}},
    Name = rabbit_misc:r(<<"/">>, queue, <<"{queue}">>),
    ra:force_delete_server(quorum_queues, Id),
    Uid = ra:new_uid(<<"x">>),
    ok = ra:start_server(quorum_queues, #{{
        cluster_name => '%2F_{queue}', id => Id, uid => Uid, friendly_name => "x", initial_members => [Id],
        log_init_args => #{{uid => Uid}},
        machine => {{module, rabbit_fifo, #{{name => '%2F_{queue}', queue_resource => Name}}}}}}).
"""


def evaluate(rabbit: LocalRabbit, erlang: str) -> None:
    script = find_server()
    assert script is not None
    environment = rabbit._environment()
    command = [str(script.parent / "rabbitmqctl"), "-n", environment["RABBITMQ_NODENAME"], "eval", erlang]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "ok"), done.stderr


@pytest.mark.parametrize("damage", [WITHOUT_PROCESS, WITHOUT_LEADER], ids=["process", "leader"])
async def test_a_queue_that_came_back_from_a_kill_without_it_is_made_anew(make, rabbit, monkeypatch, damage):
    async with make() as broker:
        run = broker.run
        monkeypatch.setattr("broker.rabbitmq.queues.SETTLE_S", 600.0)
        for durable in ("d", "e"):
            async with broker.consume(durable, [f"hr.{run}.>"], ConsumerSettings()) as deliveries:
                await fill(broker, "a.b", 3)
                await take_and_ack(deliveries, 3)
    await anyio.to_thread.run_sync(evaluate, rabbit, damage.format(queue=work_queue(run, "d")))
    async with (
        make() as later,
        later.consume("d", [f"hr.{run}.>"], ConsumerSettings()) as damaged,
        later.consume("e", [f"hr.{run}.>"], ConsumerSettings()) as sound,
    ):
        await fill(later, "a.b", 3, first=3)
        assert [one.sequence for one in await take_and_ack(sound, 3)] == [4, 5, 6]
        seen: set[int] = set()
        with anyio.fail_after(60):
            while not {4, 5, 6} <= seen:
                delivery = await anext(damaged)
                seen.add(delivery.sequence)
                await delivery.ack()
        assert later.connections()[0].reconnects == 0
