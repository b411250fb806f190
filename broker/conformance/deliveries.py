"""Consuming: shared work, acknowledgement, redelivery, bounds."""

# ruff: noqa: D103 - the name of a check is its sentence
from __future__ import annotations

import random
from collections.abc import AsyncIterator, Mapping
from typing import Final

import anyio
import anyio.lowlevel

from broker.api import Capability, ConsumerSettings, Delivery
from broker.conformance.asserting import (
    DEADLINE_S,
    SOON_S,
    BrokerFactory,
    Check,
    claim,
    equal,
    fill,
    nothing_comes,
    raises,
    take,
    take_and_ack,
    wait_until,
)
from broker.errors import TopologyError

SETTINGS: Final = ConsumerSettings()
SHORT: Final = ConsumerSettings(ack_wait_s=SOON_S)


async def check_each_message_goes_to_one_worker(make: BrokerFactory) -> None:
    seen: list[int] = []
    done = anyio.Event()

    async def work(deliveries: AsyncIterator[Delivery]) -> None:
        async for delivery in deliveries:
            seen.append(delivery.sequence)
            await delivery.ack()
            if len(seen) == 1000:
                done.set()

    async with make() as one, make() as two:
        filters = [f"hr.{one.run}.a.>"]
        async with (
            one.consume("d", filters, SETTINGS) as first,
            two.consume("d", filters, SETTINGS) as second,
            anyio.create_task_group() as tasks,
        ):
            tasks.start_soon(work, first)
            tasks.start_soon(work, second)
            await fill(one, "a.b", 1000)
            with anyio.fail_after(DEADLINE_S):
                await done.wait()
            tasks.cancel_scope.cancel()
    equal(sorted(seen), list(range(1, 1001)), "sequences")


async def check_an_ack_deletes_nothing_and_other_durables_see_all(make: BrokerFactory) -> None:
    async with make() as broker:
        await fill(broker, "a.b", 5)
        for durable in ("d", "e"):
            async with broker.consume(durable, [f"hr.{broker.run}.>"], SETTINGS) as deliveries:
                found = await take_and_ack(deliveries, 5)
                equal([d.sequence for d in found], [1, 2, 3, 4, 5], f"what {durable} got")
        equal((await broker.log_status()).num_messages, 5, "messages after all acks")


async def check_a_durable_goes_on_where_it_stopped(make: BrokerFactory) -> None:
    async with make() as broker:
        await fill(broker, "a.b", 3)
        async with broker.consume("d", [f"hr.{broker.run}.>"], SETTINGS) as deliveries:
            await take_and_ack(deliveries, 3)
    async with make() as broker:
        await fill(broker, "a.b", 1, first=3)
        async with broker.consume("d", [f"hr.{broker.run}.>"], SETTINGS) as deliveries:
            equal([d.sequence for d in await take_and_ack(deliveries, 1)], [4], "what came next")


async def check_what_is_not_acknowledged_comes_again(make: BrokerFactory) -> None:
    async with make() as broker:
        await fill(broker, "a.b", 1)
        async with broker.consume("d", [f"hr.{broker.run}.>"], SHORT) as deliveries:
            first = (await take(deliveries, 1))[0]
            equal(first.num_delivered, 1, "num_delivered at first")
            again = (await take(deliveries, 1))[0]
            equal((again.sequence, again.num_delivered), (1, 2), "sequence and num_delivered of the second delivery")
            await again.ack()
            claim(await nothing_comes(deliveries, 2 * SOON_S), "an acknowledged message stays away")


async def check_retry_comes_again_after_its_delay(make: BrokerFactory) -> None:
    async with make() as broker:
        await fill(broker, "a.b", 1)
        async with broker.consume("d", [f"hr.{broker.run}.>"], SETTINGS) as deliveries:
            first = (await take(deliveries, 1))[0]
            await first.retry(0.2)
            claim(await nothing_comes(deliveries, 0.1), "not before its delay")
            again = (await take(deliveries, 1))[0]
            equal(again.num_delivered, 2, "num_delivered")
            await again.retry(0)
            equal((await take_and_ack(deliveries, 1))[0].num_delivered, 3, "num_delivered after an instant retry")


async def check_a_sign_of_life_keeps_a_message(make: BrokerFactory) -> None:
    settings = ConsumerSettings(ack_wait_s=2 * SOON_S)
    async with make() as broker:
        await fill(broker, "a.b", 1)
        async with broker.consume("d", [f"hr.{broker.run}.>"], settings) as deliveries:
            held = (await take(deliveries, 1))[0]
            for _ in range(4):
                claim(await nothing_comes(deliveries, SOON_S), "nobody else gets it while it is worked on")
                await held.still_working()
            await held.ack()


async def check_what_waits_for_its_worker_is_no_second_delivery(make: BrokerFactory) -> None:
    """What a living worker was given ahead and did not take yet is kept for it beyond the ack wait."""
    async with make() as broker:
        await fill(broker, "a.b", 3)
        async with (
            broker.consume("d", [f"hr.{broker.run}.>"], SHORT) as deliveries,
            broker.consume("e", [f"hr.{broker.run}.b.>"], SHORT) as silent,
        ):
            held = (await take(deliveries, 1))[0]
            for _ in range(6):
                claim(await nothing_comes(silent, SOON_S / 2), "nothing for others")
                await held.still_working()
            await held.ack()
            rest = await take_and_ack(deliveries, 2)
            equal(
                [(d.sequence, d.num_delivered) for d in rest],
                [(2, 1), (3, 1)],
                "what waited, and how often it was given",
            )
            claim(await nothing_comes(deliveries, 2 * SOON_S), "nothing is given twice")


async def check_a_worker_holds_no_more_than_its_prefetch(make: BrokerFactory) -> None:
    settings = ConsumerSettings(prefetch=2)
    async with make() as one, make() as two:
        await fill(one, "a.b", 5)
        filters = [f"hr.{one.run}.>"]
        async with one.consume("d", filters, settings) as first:
            held = await take(first, 2)
            claim(await nothing_comes(first), "no third message for a worker with two slots")
            async with two.consume("d", filters, settings) as second:
                equal(len(await take(second, 2)), 2, "what the second worker got")
                await held[0].ack()
                equal(len(await take(first, 1)), 1, "what a free slot gets")


async def check_max_ack_pending_bounds_all_workers(make: BrokerFactory) -> None:
    settings = ConsumerSettings(max_ack_pending=3)
    async with make() as broker:
        await fill(broker, "a.b", 5)
        async with broker.consume("d", [f"hr.{broker.run}.>"], settings) as deliveries:
            held = await take(deliveries, 3)
            claim(await nothing_comes(deliveries), "no fourth message")
            for delivery in held:
                await delivery.ack()
            equal([d.sequence for d in await take_and_ack(deliveries, 2)], [4, 5], "the rest")


async def check_filters_choose(make: BrokerFactory) -> None:
    async with make() as broker:
        for number, topic in enumerate(["a.b", "a.c", "a.d"]):
            await broker.publish(f"hr.{broker.run}.{topic}.{number}", b"")
        filters = [f"hr.{broker.run}.a.b.>", f"hr.{broker.run}.a.d.>"]
        async with broker.consume("d", filters, SETTINGS) as deliveries:
            equal([d.sequence for d in await take_and_ack(deliveries, 2)], [1, 3], "sequences")


async def check_a_durable_with_other_settings_is_reported(make: BrokerFactory) -> None:
    async with make() as broker:
        filters = [f"hr.{broker.run}.>"]
        async with broker.consume("d", filters, SETTINGS):
            pass

        async def open_with(filters: list[str], settings: ConsumerSettings) -> None:
            async with broker.consume("d", filters, settings):
                pass

        await raises(TopologyError, open_with([f"hr.{broker.run}.a.>"], SETTINGS), "other filters")
        await raises(TopologyError, open_with(filters, SHORT), "another ack_wait")


async def check_cancelling_loses_nothing(make: BrokerFactory) -> None:
    """A read that is cancelled at the moment a message arrives must not take it along."""
    rng = random.Random(7)  # noqa: S311 - moments, not secrets
    async with make() as broker, make() as other:
        seen: set[int] = set()
        async with (
            broker.consume("d", [f"hr.{broker.run}.>"], SETTINGS) as deliveries,
            anyio.create_task_group() as tasks,
        ):
            tasks.start_soon(fill, other, "a.b", 500)
            with anyio.fail_after(20):
                while len(seen) < 500:
                    with anyio.move_on_after(rng.random() * 0.003):
                        while True:
                            delivery = await anext(deliveries)
                            seen.add(delivery.sequence)
                            await delivery.ack()
                            await anyio.lowlevel.checkpoint()
        equal(len(seen), 500, "messages seen")
        status = (await broker.consumers())[0]
        equal(status.num_redelivered, 0, "redeliveries")


async def check_status_tells_where_a_durable_stands(make: BrokerFactory) -> None:
    async with make() as broker:
        await fill(broker, "a.b", 4)
        filters = [f"hr.{broker.run}.>"]
        async with broker.consume("d", filters, ConsumerSettings(prefetch=2)) as deliveries:
            await take_and_ack(deliveries, 1)
            await take(deliveries, 1)

            async def settled() -> bool:
                status = (await broker.consumers())[0]
                return status.ack_floor == 1 and status.num_ack_pending >= 1

            await wait_until(settled, "one acknowledged, one held")
            status = (await broker.consumers())[0]
            equal((status.durable, status.filters), ("d", filters), "name and filters")
            equal(status.num_pending + status.num_ack_pending + 1, 4, "pending, held and done together")


CHECKS: Final[tuple[Check, ...]] = (
    check_each_message_goes_to_one_worker,
    check_an_ack_deletes_nothing_and_other_durables_see_all,
    check_a_durable_goes_on_where_it_stopped,
    check_what_is_not_acknowledged_comes_again,
    check_retry_comes_again_after_its_delay,
    check_a_sign_of_life_keeps_a_message,
    check_what_waits_for_its_worker_is_no_second_delivery,
    check_a_worker_holds_no_more_than_its_prefetch,
    check_max_ack_pending_bounds_all_workers,
    check_filters_choose,
    check_a_durable_with_other_settings_is_reported,
    check_cancelling_loses_nothing,
    check_status_tells_where_a_durable_stands,
)

NEEDS: Final[Mapping[Check, Capability]] = {
    check_max_ack_pending_bounds_all_workers: Capability.PENDING_BOUND,
    check_status_tells_where_a_durable_stands: Capability.CONSUMER_POSITIONS,
}
"""Checks of what not every broker can do."""
