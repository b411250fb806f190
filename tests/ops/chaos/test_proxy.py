"""The proxy between a real client and a real server."""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest

from broker.api import Broker, ConsumerSettings
from broker.connect import connect
from broker.embedded import embedded_server
from broker.errors import NotConnectedError
from ops.chaos.proxy import Proxy, Weather

SHORT = ConsumerSettings(ack_wait_s=1.0)


@pytest.fixture
async def world(tmp_path: Path):
    weather = Weather()
    async with embedded_server(tmp_path / "nats") as server, Proxy(weather, int(server.url.rsplit(":", 1)[1])) as proxy:
        url = f"nats://127.0.0.1:{proxy.port}"
        async with connect(url, "r", server.connect_settings(), create=True) as broker:
            yield weather, proxy, broker


async def _take(broker: Broker, count: int) -> list[tuple[int, int]]:
    """(sequence, deliveries) of the first `count` messages that a durable hands out; each is acknowledged."""
    found: list[tuple[int, int]] = []
    async with broker.consume("d", ["hr.r.a.b.>"], SHORT) as deliveries:
        with anyio.fail_after(30):
            async for delivery in deliveries:
                found.append((delivery.sequence, delivery.num_delivered))
                await delivery.ack()
                if len(found) == count:
                    return found
    return found


async def test_a_delivery_may_arrive_twice(world) -> None:
    weather, _, broker = world
    weather.delivers_twice = True
    await broker.publish("hr.r.a.b.1", b"x")
    assert await _take(broker, 2) == [(1, 1), (1, 1)]


async def test_a_lost_acknowledgement_makes_the_broker_deliver_again(world) -> None:
    weather, _, broker = world
    weather.loses_acks = True
    await broker.publish("hr.r.a.b.1", b"x")
    assert await _take(broker, 2) == [(1, 1), (1, 2)]


async def test_readers_see_everything_once_and_in_order_whatever_happens_to_deliveries(world) -> None:
    weather, _, broker = world
    weather.delivers_twice, weather.delivers_late_s = True, 0.1
    for number in range(20):
        await broker.publish(f"hr.r.a.b.{number}", b"x")
    async with broker.read(["hr.r.>"], follow=False) as records:
        assert [record.sequence async for record in records] == list(range(1, 21))


async def test_a_reset_line_is_renewed_and_nothing_is_lost(world) -> None:
    _, proxy, broker = world
    for number in range(5):
        await broker.publish(f"hr.r.a.b.{number}", b"x")
        proxy.reset()
    assert (await broker.log_status()).last_sequence == 5


async def test_a_refused_line_is_waited_for(world, wait_until) -> None:
    weather, proxy, broker = world
    weather.refuses = True
    proxy.reset()
    async with anyio.create_task_group() as tasks:
        done = anyio.Event()

        async def publish() -> None:
            await broker.publish("hr.r.a.b.1", b"x")
            done.set()

        tasks.start_soon(publish)
        await wait_until(lambda: not broker.connections()[0].connected)
        assert not done.is_set()
        weather.refuses = False
        with anyio.fail_after(20):
            await done.wait()


async def test_a_silent_line_answers_nobody(world) -> None:
    weather, _, broker = world
    weather.silent = True
    with pytest.raises(NotConnectedError):
        await broker.request("hrt.r.nobody", b"", deadline_s=0.3)
