from __future__ import annotations

import anyio
import anyio.lowlevel
import pytest

from broker.api import ConsumerSettings
from broker.clock import ManualClock
from broker.conformance.asserting import fill, nothing_comes, take
from broker.errors import StoreFullError
from broker.memory import MemoryBroker, MemoryServer


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture
def broker(clock):
    return MemoryBroker(MemoryServer(clock=clock), "r")


async def test_a_redelivery_waits_for_the_clock_and_not_for_the_wall(broker, clock):
    await fill(broker, "a.b", 1)
    async with broker.consume("d", ["hr.r.>"], ConsumerSettings(ack_wait_s=3600)) as deliveries:
        await take(deliveries, 1)
        clock.advance(3599)
        assert await nothing_comes(deliveries, 0.01)
        clock.advance(1)
        assert (await take(deliveries, 1))[0].num_delivered == 2


async def test_a_clock_that_moves_wakes_a_worker_who_waits(broker, clock):
    await fill(broker, "a.b", 1)
    async with (
        broker.consume("d", ["hr.r.>"], ConsumerSettings(ack_wait_s=60)) as deliveries,
        anyio.create_task_group() as tasks,
    ):
        await take(deliveries, 1)
        found: list[int] = []

        async def wait() -> None:
            found.append((await take(deliveries, 1))[0].num_delivered)

        tasks.start_soon(wait)
        await anyio.lowlevel.checkpoint()
        clock.advance(61)
    assert found == [2]


async def test_what_a_worker_left_behind_goes_to_another_after_ack_wait(broker, clock):
    await fill(broker, "a.b", 2)
    settings = ConsumerSettings(ack_wait_s=10, prefetch=1)
    async with broker.consume("d", ["hr.r.>"], settings) as first:
        await take(first, 1)
    async with broker.consume("d", ["hr.r.>"], settings) as second:
        held = (await take(second, 1))[0]
        assert held.sequence == 2
        await held.ack()
        clock.advance(10)
        assert [(d.sequence, d.num_delivered) for d in await take(second, 1)] == [(1, 2)]


async def test_messages_that_a_worker_forgot_do_not_block_it_for_ever(broker, clock):
    await fill(broker, "a.b", 3)
    settings = ConsumerSettings(ack_wait_s=10, prefetch=2)
    async with broker.consume("d", ["hr.r.>"], settings) as deliveries:
        await take(deliveries, 2)
        assert await nothing_comes(deliveries, 0.01)
        clock.advance(11)
        assert [d.num_delivered for d in await take(deliveries, 2)] == [2, 2]


async def test_a_full_log_refuses_until_it_is_purged(clock):
    broker = MemoryBroker(MemoryServer(clock=clock, max_bytes=1000), "r")

    async def publish_100() -> None:
        for number in range(100):
            await broker.publish(f"hr.r.a.b.{number}", b"x")

    with pytest.raises(StoreFullError, match="of 1000 bytes and refuses"):
        await publish_100()
    assert await broker.purge_below(5) == 4
    assert (await broker.publish("hr.r.a.b.more", b"x")).created
