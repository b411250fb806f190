from __future__ import annotations

import msgspec
import pytest

from broker.connect import connect
from broker.memory import MemoryServer
from pipeline.holds import HOLDS, MARK_KEY, HoldWatch, held
from schemas.messages.sampling import LogHold, Retain


@pytest.fixture
async def broker():
    async with connect("memory://", "r", memory=MemoryServer()) as broker:
        yield broker


def counting(watch: HoldWatch, states, now_s: float) -> list[int]:
    return [hold.sequence for hold in watch.look(states, now_s)[0].values()]


async def test_a_hold_counts_while_its_context_is_open(broker):
    watch = HoldWatch()
    async with held(broker, "why", sequence=7, what="why g1"):
        assert counting(watch, await broker.list_state(HOLDS), 0.0) == [7]
    live, over = watch.look(await broker.list_state(HOLDS), 1.0)
    assert live == {}
    assert len(over) == 1


async def test_a_moved_hold_is_told(broker, wait_until):
    async with held(broker, "recorder", sequence=1, what="recorder", ttl_s=0.3) as hold:
        hold.move(40)
        hold.move(30)

        async def told() -> bool:
            return counting(HoldWatch(), await broker.list_state(HOLDS), 0.0) == [40]

        await wait_until(told)


async def test_a_hold_knows_what_was_purged_before_it_began(broker):
    await broker.save_state(MARK_KEY, msgspec.msgpack.encode(Retain(ordinal=3, sequence=120, held_by="")))
    async with held(broker, "why", sequence=1, what="why") as hold:
        assert hold.purged_below == 120


async def test_readers_of_one_name_hold_each_for_itself_unless_they_share(broker):
    async with held(broker, "why", sequence=1, what="a"), held(broker, "why", sequence=2, what="b"):
        assert sorted(counting(HoldWatch(), await broker.list_state(HOLDS), 0.0)) == [1, 2]
    async with (
        held(broker, "rec", sequence=5, what="a", own=False),
        held(broker, "rec", sequence=9, what="b", own=False),
    ):
        assert counting(HoldWatch(), await broker.list_state(HOLDS), 0.0) == [9]


async def test_an_error_in_the_body_comes_out_as_itself(broker):
    with pytest.raises(ValueError, match="mine"):
        async with held(broker, "why", sequence=1, what="why"):
            raise ValueError("mine")


def test_a_hold_that_nobody_renews_runs_out_by_the_watcher_s_own_clock():
    watch = HoldWatch()
    data = msgspec.msgpack.encode(LogHold(what="dead reader", sequence=3, ttl_s=60.0))
    assert counting(watch, {"hold.a": (data, 5)}, 1000.0) == [3]
    assert counting(watch, {"hold.a": (data, 5)}, 1059.0) == [3]
    assert counting(watch, {"hold.a": (data, 6)}, 1059.0) == [3]
    assert counting(watch, {"hold.a": (data, 6)}, 1118.0) == [3]
    live, over = watch.look({"hold.a": (data, 6)}, 1120.0)
    assert (live, over) == ({}, ["hold.a"])
