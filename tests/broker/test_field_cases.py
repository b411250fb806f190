# ruff: noqa: SIM117 - a broker and what is done with it read better apart
"""Failures that users of other systems met in delivery, played again; each test names its case."""

from __future__ import annotations

import functools

import anyio
import pytest

from broker.api import Broker, ConsumerSettings
from broker.conformance.asserting import fill, take, take_and_ack, wait_until
from broker.connect import connect
from broker.errors import NoSuchStreamError
from broker.topology import RunLimits

SMALL = RunLimits(log_max_bytes=64 * 2**20, payload_max_bytes=64 * 2**20, state_max_bytes=16 * 2**20)
SETTINGS = ConsumerSettings()


@pytest.fixture
def opened(server, run):
    return functools.partial(connect, server.url, run, server.connect_settings(), create=True, limits=SMALL)


async def test_murmur_141_a_work_that_is_asked_for_again_has_a_subject_of_its_own_and_is_delivered(opened):
    async with opened() as broker:
        async with broker.consume("d", [f"hr.{broker.run}.episode.requested.>"], SETTINGS) as deliveries:
            await broker.publish(f"hr.{broker.run}.episode.requested.g1.0.1", b"attempt 1")
            await take_and_ack(deliveries, 1)
            assert not (await broker.publish(f"hr.{broker.run}.episode.requested.g1.0.1", b"attempt 1")).created
            assert (await broker.publish(f"hr.{broker.run}.episode.requested.g1.0.2", b"attempt 2")).created
            assert [d.data for d in await take_and_ack(deliveries, 1)] == [b"attempt 2"]


async def test_murmur_141_b_a_replay_of_100_messages_inside_the_duplicate_window_is_delivered(opened):
    async with opened() as broker:
        await fill(broker, "a.b", 100)
        async with broker.read([f"hr.{broker.run}.>"], follow=False) as records:
            recording = [record async for record in records]
        await broker.purge_below(101)
        for record in recording:
            assert (await broker.publish(record.subject, record.data)).created
        async with broker.consume("d", [f"hr.{broker.run}.>"], SETTINGS) as deliveries:
            found = [d.subject for d in await take_and_ack(deliveries, 100)]
        assert found == [record.subject for record in recording]
        assert (await broker.log_status()).num_messages == 100


async def test_murmur_141_c_a_replay_onto_a_log_that_still_stands_stores_nothing_twice(opened):
    async with opened() as broker:
        await fill(broker, "a.b", 100)
        async with broker.read([f"hr.{broker.run}.>"], follow=False) as records:
            recording = [record async for record in records]
        for record in recording:
            again = await broker.publish(record.subject, record.data)
            assert (again.created, again.standing, again.sequence) == (False, None, record.sequence)
        assert (await broker.log_status()).num_messages == 100


async def test_nats_server_5839_three_stages_go_on_after_a_killed_server_without_a_restart_of_their_own(
    own_server, run
):
    settings = own_server.connect_settings()
    topics = ["a.b", "b.c", "c.d", "d.e"]

    async def stage(broker: Broker, number: int) -> None:
        source, target = topics[number], topics[number + 1]
        async with broker.consume(f"stage{number}", [f"hr.{run}.{source}.>"], ConsumerSettings(ack_wait_s=2)) as work:
            async for delivery in work:
                await broker.publish(delivery.subject.replace(f".{source}.", f".{target}."), delivery.data)
                await delivery.ack()

    async with connect(own_server.url, run, settings, create=True) as broker, anyio.create_task_group() as tasks:
        for number in range(3):
            tasks.start_soon(stage, broker, number)
        async with broker.read([f"hr.{run}.d.e.>"]) as results:
            await fill(broker, "a.b", 50)
            first = await take(results, 50)
            await own_server.kill()
            await own_server.start()
            with anyio.fail_after(10):
                await fill(broker, "a.b", 50, first=50)
                second = await take(results, 50)
        assert len({record.subject for record in first + second}) == 100

        async def all_wait() -> bool:
            consumers = await broker.consumers()
            return all(c.num_pending == 0 and c.num_waiting > 0 for c in consumers)

        await wait_until(all_wait, "a parked pull of every stage, seen in its status")
        tasks.cancel_scope.cancel()


async def test_nats_server_5839_a_log_in_memory_is_lost_with_its_server_and_the_loss_is_told(own_server, run):
    limits = RunLimits(storage="memory", log_max_bytes=2**20, payload_max_bytes=2**20, state_max_bytes=2**20)
    settings = own_server.connect_settings()
    async with connect(own_server.url, run, settings, create=True, limits=limits) as broker:
        async with broker.consume("d", [f"hr.{run}.>"], SETTINGS) as deliveries:
            await fill(broker, "a.b", 50)
            await take_and_ack(deliveries, 50)
            await own_server.kill()
            await own_server.start()
            with pytest.raises(NoSuchStreamError, match="lost with all messages up to at least sequence 50"):
                await take(deliveries, 1)
    async with connect(own_server.url, run, settings, create=True, limits=limits) as broker:
        async with broker.consume("d", [f"hr.{run}.>"], SETTINGS) as deliveries:
            await fill(broker, "a.b", 50, first=50)
            assert len(await take_and_ack(deliveries, 50)) == 50


async def test_nats_server_4956_what_cannot_be_done_is_copied_and_then_acknowledged_and_delays_nobody(opened):
    """The policy is the runner's; the broker's part: a count of deliveries, retries, and a log that keeps all."""
    async with opened() as broker:
        await fill(broker, "in.x", 3, first=1)
        order: list[tuple[int, int]] = []
        async with broker.consume("d", [f"hr.{broker.run}.in.x.>"], SETTINGS) as deliveries:
            while len(order) < 5:
                delivery = (await take(deliveries, 1))[0]
                order.append((delivery.sequence, delivery.num_delivered))
                give_up = delivery.sequence == 3 or delivery.num_delivered == 3
                if delivery.sequence == 2:
                    await delivery.ack()
                elif give_up:
                    await broker.publish(f"hr.{broker.run}.dead.letter.d.{delivery.sequence}", b"reason")
                    await delivery.ack()
                else:
                    await delivery.retry(0.05)
        assert order[:3] == [(1, 1), (2, 1), (3, 1)]
        assert order[3:] == [(1, 2), (1, 3)]
        async with broker.read([f"hr.{broker.run}.dead.letter.>"], follow=False) as letters:
            assert [record.subject.rsplit(".", 1)[1] async for record in letters] == ["3", "1"]
        status = (await broker.consumers())[0]
        assert (status.num_pending, status.num_redelivered) == (0, 0)
