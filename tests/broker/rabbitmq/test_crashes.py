"""RabbitMQ killed and started again under load, dispatchers that die, tasks that kill their workers."""

from __future__ import annotations

from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import anyio
import pytest
from pamqp.commands import Basic
from waiting import wait_until

from broker.api import Broker, ConsumerSettings
from broker.conformance.asserting import DEADLINE_S, fill, take, take_and_ack
from broker.connect import connect
from broker.local_rabbit import LocalRabbit
from broker.rabbitmq.parked import Parked, ParkedWork
from broker.rabbitmq.queues import DELIVERY_LIMIT, is_there, work_queue
from broker.settings import ConnectSettings

pytestmark = [pytest.mark.resources, pytest.mark.timeout(400)]
TOPICS = ["a.b", "b.c", "c.d"]
AHEAD = 500
"""How many messages a publisher is before the last of its readers."""


@pytest.fixture
async def own_rabbit(tmp_path: Path):
    server = LocalRabbit(tmp_path / "rabbit")
    await server.start()
    yield server
    server.kill()


async def test_a_server_killed_under_load_loses_and_doubles_nothing(own_rabbit, tmp_path):
    """The RabbitMQ part of: whatever dies, what was confirmed is there, and the first message of a key stands."""
    settings = ConnectSettings(payload_dir=str(tmp_path / "shared"))
    read: list[str] = []
    confirmed: list[str] = []
    stop = anyio.Event()

    async def stage(broker: Broker, number: int) -> None:
        source, target = TOPICS[number], TOPICS[number + 1]
        async with broker.consume(f"stage{number}", [f"hr.r.{source}.>"], ConsumerSettings(ack_wait_s=5)) as work:
            async for delivery in work:
                await broker.publish(delivery.subject.replace(f".{source}.", f".{target}."), delivery.data)
                await delivery.ack()

    async def publish(broker: Broker) -> None:
        number = 0
        while not stop.is_set():
            # the stages are slower than this: what waits before them stays few
            await wait_until(lambda: len(confirmed) < len(read) + AHEAD, "work goes on", deadline_s=150)
            subject = f"hr.r.a.b.{number}"
            await broker.publish(subject, b"x" * 500)
            confirmed.append(subject)
            number += 1

    async def follow(broker: Broker) -> None:
        async with broker.read(["hr.r.c.d.>"]) as records:
            async for record in records:
                read.append(record.subject)  # noqa: PERF401 - watched while it grows

    async def moves_on() -> None:
        before = len(read)  # a queue that was killed at its birth is made anew after a while
        await wait_until(lambda: len(read) > before + 20, "work goes on", deadline_s=80)

    async with connect(own_rabbit.url, "r", settings, create=True) as broker, anyio.create_task_group() as tasks:
        tasks.start_soon(publish, broker)
        tasks.start_soon(follow, broker)
        for number in range(2):
            tasks.start_soon(stage, broker, number)
        for _ in range(3):
            with anyio.fail_after(90):
                await moves_on()
                own_rabbit.kill()
                await own_rabbit.start()
        stop.set()
        await wait_until(lambda: len(read) >= len(confirmed), "what was confirmed is through", deadline_s=60)
        assert sorted(read) == sorted(subject.replace(".a.b.", ".c.d.") for subject in confirmed)
        assert len(set(read)) == len(read)
        tasks.cancel_scope.cancel()


async def test_queues_whose_server_is_killed_at_their_birth_are_made_anew_and_fed_all(own_rabbit, tmp_path):
    """Such a queue has no leader and blocks the channel of its first publish: of a connection whose channels wait with more
    than some hundred publishes RabbitMQ reads nothing more.
    """
    settings = ConnectSettings(payload_dir=str(tmp_path / "shared"))
    durables = [f"d{number}" for number in range(4)]
    seen: dict[str, set[int]] = {durable: set() for durable in durables}

    async def work(broker: Broker, durable: str) -> None:
        async with broker.consume(durable, ["hr.r.a.>"], ConsumerSettings()) as deliveries:
            async for delivery in deliveries:
                seen[durable].add(delivery.sequence)
                await delivery.ack()

    async with connect(own_rabbit.url, "r", settings, create=True) as broker:
        await fill(broker, "a.b", 1000)
        async with anyio.create_task_group() as tasks:
            for durable in durables:
                tasks.start_soon(work, broker, durable)
            for durable in durables:
                await wait_until(partial(is_there, broker._link, work_queue("r", durable)), "its queue is born")
            own_rabbit.kill()
            await own_rabbit.start()
            every = set(range(1, 1001))
            await wait_until(lambda: all(got == every for got in seen.values()), "all is worked on", deadline_s=90)
            tasks.cancel_scope.cancel()


async def test_another_dispatcher_takes_over_when_one_dies(make):
    """The process that dispatches is gone without a word: the lease runs out and work goes on."""
    async with make() as first, make() as second:
        filters = [f"hr.{first.run}.>"]
        async with second.consume("d", filters, ConsumerSettings()) as deliveries:
            await fill(first, "a.b", 5)
            await take_and_ack(deliveries, 5)
            async with first.consume("e", filters, ConsumerSettings()):
                pass  # offers to dispatch, too
            second._dispatcher.run = None  # nothing more of it is begun
            scope = second._tasks.cancel_scope
            assert not scope.cancel_called
            await fill(first, "a.b", 5, first=5)
            assert len(await take_and_ack(deliveries, 5)) == 5


async def test_a_task_that_kills_its_workers_comes_back_with_its_count(make, rabbit, rabbit_run, tmp_path):
    """Beyond the queue's delivery limit it goes round by the dead-letter queue, and its count goes on."""

    @asynccontextmanager
    async def worker_that_dies():
        async with make() as broker, broker.consume("d", [f"hr.{broker.run}.>"], ConsumerSettings()) as deliveries:
            yield deliveries

    async with make() as broker:
        await fill(broker, "a.b", 1)
    highest, tries = 0, 0
    with anyio.fail_after(120):
        # A dispatcher that dies before its confirmation feeds twice: two copies may go round.
        while highest <= DELIVERY_LIMIT + 1:
            tries += 1
            async with worker_that_dies() as deliveries:
                highest = max(highest, (await take(deliveries, 1))[0].num_delivered)
            assert highest <= tries


async def test_work_longer_than_rabbitmq_waits_is_parked_and_stays_with_its_worker(make, monkeypatch):
    monkeypatch.setattr("broker.rabbitmq.broker.HOLD_S", 0.3)
    settings = ConsumerSettings(ack_wait_s=1.0)
    async with make() as broker:
        await fill(broker, "a.b", 1)
        async with broker.consume("d", [f"hr.{broker.run}.>"], settings) as deliveries:
            held = (await take(deliveries, 1))[0]
            dues_s: list[float] = []

            async def outlasts_its_ack_wait() -> bool:
                await held.still_working()
                dues_s.extend(one.due_unix_s for one in await broker._parked.all())
                return bool(dues_s) and dues_s[-1] > dues_s[0] + 2 * settings.ack_wait_s

            await wait_until(outlasts_its_ack_wait, "parked work is pushed back")
            parked = await broker._parked.all()
            assert [(one.durable, one.sequence) for one in parked] == [("d", 1)]
            assert (await broker.consumers())[0].num_ack_pending == 1
            await held.ack()
            assert await broker._parked.all() == []
            await fill(broker, "a.b", 1, first=1)
            assert [one.sequence for one in await take_and_ack(deliveries, 1)] == [2]


async def test_parked_work_of_a_dead_worker_is_handed_out_again(make, monkeypatch):
    monkeypatch.setattr("broker.rabbitmq.broker.HOLD_S", 0.0)
    monkeypatch.setattr("broker.rabbitmq.work.PARKED_GRACE_S", 0.2)
    settings = ConsumerSettings(ack_wait_s=0.5)
    async with make() as broker:
        await fill(broker, "a.b", 1)
        async with broker.consume("d", [f"hr.{broker.run}.>"], settings) as deliveries:
            held = (await take(deliveries, 1))[0]
            await held.still_working()
            assert len(await broker._parked.all()) == 1
        async with broker.consume("d", [f"hr.{broker.run}.>"], settings) as deliveries:
            again = await take_and_ack(deliveries, 1)
            assert (again[0].sequence, again[0].num_delivered) == (1, 2)


async def test_an_acknowledgement_beside_a_sign_of_life_leaves_nothing_parked(make, monkeypatch):
    monkeypatch.setattr("broker.rabbitmq.broker.HOLD_S", 0.0)
    async with make() as broker:
        await fill(broker, "a.b", 10)
        async with broker.consume("d", [f"hr.{broker.run}.>"], ConsumerSettings()) as deliveries:
            for held in await take(deliveries, 10):
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(held.still_working)
                    tasks.start_soon(held.ack)
            assert await broker._parked.all() == []
            await fill(broker, "a.b", 1, first=10)
            assert [one.sequence for one in await take_and_ack(deliveries, 1)] == [11]


async def test_what_a_later_delivery_parked_stays_when_an_earlier_one_is_done(tmp_path):
    parked = ParkedWork(tmp_path)
    first = Parked(durable="d", sequence=1, num_delivered=1, due_unix_s=0.0)
    again = Parked(durable="d", sequence=1, num_delivered=2, due_unix_s=0.0)
    await parked.put(first)
    await parked.put(again)
    await parked.remove(first)
    assert await parked.due() == [again]


async def test_a_worker_whose_queue_is_made_anew_goes_on(make):
    """RabbitMQ cancels the consumers of a queue that is deleted, as the dispatcher does where one was killed at its birth."""
    async with make() as broker, broker.consume("d", [f"hr.{broker.run}.>"], ConsumerSettings()) as deliveries:
        await fill(broker, "a.b", 3)
        await take_and_ack(deliveries, 3)
        async with broker._link.channel() as channel:
            await channel.delete(work_queue(broker.run, "d"))
        await fill(broker, "a.b", 3, first=3)
        assert [one.sequence for one in await take_and_ack(deliveries, 3)] == [4, 5, 6]


async def test_what_a_foreign_client_writes_into_the_stream_harms_nothing(make, rabbit):
    async with make() as broker:
        await fill(broker, "a.b", 2)
        async with broker._link.channel(confirms=True) as channel:
            await channel.publish(b"not ours", Basic.Properties(delivery_mode=2), routing_key=f"HR_{broker.run}")
        await fill(broker, "a.b", 1, first=2)
        async with broker.read([f"hr.{broker.run}.>"], follow=False) as records:
            with anyio.fail_after(DEADLINE_S):
                assert [record.sequence async for record in records] == [1, 2, 3]


async def test_an_index_is_restored_from_its_snapshot(make, monkeypatch):
    """A process that connects later reads only what came after it."""
    async with make() as broker:
        await fill(broker, "a.b", 30)
        await broker.save_snapshot()
        await fill(broker, "a.b", 5, first=30)
    async with make() as broker:
        assert broker._follower.tail.first > 30
        async with broker.read([f"hr.{broker.run}.>"], follow=False) as records:
            assert [record.sequence async for record in records] == list(range(1, 36))
        again = await broker.publish(f"hr.{broker.run}.a.b.3", b"3")
        assert not again.created
