"""A busy run whose server is killed again and again. Long: every night."""

from __future__ import annotations

import anyio
import pytest
from waiting import wait_until

from broker.api import Broker, ConsumerSettings
from broker.connect import connect

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(240)]
TOPICS = ["a.b", "b.c", "c.d", "d.e"]


async def test_a_server_killed_10_times_in_a_row_with_all_stages_busy_loses_and_doubles_nothing(own_server, run):
    read: list[str] = []
    stop = anyio.Event()

    async def stage(broker: Broker, number: int) -> None:
        source, target = TOPICS[number], TOPICS[number + 1]
        settings = ConsumerSettings(ack_wait_s=3)
        async with broker.consume(f"stage{number}", [f"hr.{run}.{source}.>"], settings) as work:
            async for delivery in work:
                await broker.publish(delivery.subject.replace(f".{source}.", f".{target}."), delivery.data)
                await delivery.ack()

    async def publish(broker: Broker) -> None:
        number = 0
        while not stop.is_set():
            await broker.publish(f"hr.{run}.a.b.{number}", b"x" * 500)
            number += 1

    async def follow(broker: Broker) -> None:
        async with broker.read([f"hr.{run}.d.e.>"]) as records:
            async for record in records:
                read.append(record.subject)  # noqa: PERF401 - watched while it grows

    async def moves_on(deadline_s: float) -> None:
        before = len(read)
        await wait_until(lambda: len(read) > before + 100, "work goes on", deadline_s=deadline_s)

    settings = own_server.connect_settings()
    async with connect(own_server.url, run, settings, create=True) as broker, anyio.create_task_group() as tasks:
        tasks.start_soon(publish, broker)
        tasks.start_soon(follow, broker)
        for number in range(3):
            tasks.start_soon(stage, broker, number)
        for _ in range(10):
            await moves_on(deadline_s=15)
            await own_server.kill()
            await own_server.start()
            await moves_on(deadline_s=5)
        stop.set()

        async def all_done() -> bool:
            status = await broker.log_status()
            return status.last_sequence == 4 * len(read)

        await wait_until(all_done, "every message went through all stages", deadline_s=15)
        assert len(set(read)) == len(read)
        tasks.cancel_scope.cancel()
