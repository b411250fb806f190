"""How far each durable is fed is known after a good end, however short the run was."""

from __future__ import annotations

import pytest
from aiormq.exceptions import DeliveryError

from broker.api import ConsumerSettings
from broker.conformance.asserting import fill, take_and_ack
from broker.errors import BrokerError
from broker.rabbitmq import dispatcher
from broker.rabbitmq.dispatcher import position_bytes, read_position
from broker.rabbitmq.queues import stream_queue

pytestmark = pytest.mark.resources


async def test_a_run_that_ended_before_its_queues_had_settled_has_nothing_pending(make, monkeypatch):
    async with make() as broker:
        monkeypatch.setattr("broker.rabbitmq.queues.SETTLE_S", 600.0)
        async with broker.consume("d", [f"hr.{broker.run}.>"], ConsumerSettings()) as deliveries:
            await fill(broker, "a.b", 20)
            await take_and_ack(deliveries, 20)
    monkeypatch.setattr("broker.rabbitmq.queues.SETTLE_S", 0.0)
    async with make() as later:
        assert [(one.durable, one.num_pending) for one in await later.consumers()] == [("d", 0)]


async def test_the_next_dispatcher_goes_on_where_the_one_before_it_ended(make, monkeypatch):
    async with make() as second:
        async with make() as first:
            monkeypatch.setattr("broker.rabbitmq.queues.SETTLE_S", 600.0)
            async with first.consume("d", [f"hr.{first.run}.>"], ConsumerSettings()) as deliveries:
                await fill(first, "a.b", 20)
                await take_and_ack(deliveries, 20)
        async with second.consume("d", [f"hr.{second.run}.>"], ConsumerSettings()) as deliveries:
            await fill(second, "a.b", 1, first=20)
            [one] = await take_and_ack(deliveries, 1)
            assert one.subject.endswith(".20")
            assert await second._num_ready("d") == 0


async def test_a_task_that_a_young_queue_refuses_is_not_overtaken(make, monkeypatch):
    put, refused = dispatcher.publish_task, []

    async def refuse_the_first(channel, run, task):
        if not refused:
            refused.append(task.sequence)
            raise DeliveryError(None, None)
        await put(channel, run, task)

    monkeypatch.setattr(dispatcher, "publish_task", refuse_the_first)
    async with make() as broker:
        await fill(broker, "a.b", 20)
        async with broker.consume("d", [f"hr.{broker.run}.>"], ConsumerSettings()) as deliveries:
            assert [one.sequence for one in await take_and_ack(deliveries, 20)] == list(range(1, 21))
    assert refused == [1]


async def test_a_new_stream_beside_the_folder_of_one_that_is_gone_is_refused(make):
    async with make() as broker:
        await fill(broker, "a.b", 3)
        await broker.save_snapshot()
        async with broker._link.channel() as channel:
            await channel.delete(stream_queue(broker.run))
    with pytest.raises(BrokerError, match="give the run another id, or remove that folder"):
        async with make():
            pass


def test_a_position_says_whether_its_queue_is_young():
    assert read_position(position_bytes(17, is_young=True)) == (17, True)
    assert read_position(position_bytes(17, is_young=False)) == (17, False)
    assert read_position(b"17") == (17, False)
