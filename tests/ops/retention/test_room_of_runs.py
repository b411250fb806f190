"""Runs whose groups under way would need more room than their store has."""

from __future__ import annotations

import anyio
import msgspec
import pytest
from small_loop import GROUPS, SmallLoop

from broker.connect import open_admin
from broker.topology import RunLimits, run_topology
from ops.accounts import account
from pipeline.headroom import BULK_STOP_AT

LIMITS = RunLimits(log_max_bytes=2**22, payload_max_bytes=500_000, state_max_bytes=4 * 2**20)
TOKENS, STALENESS, STEPS = 2000, 20, 40
"""A group takes some 40 kB, and there is credit for 42 of them: 1.7 MB."""


@pytest.fixture
def raise_limit(server):
    async def change(payload_max_bytes: int) -> None:
        limits = msgspec.structs.replace(LIMITS, payload_max_bytes=payload_max_bytes)
        async with open_admin(server.url, server.connect_settings()) as admin:
            await admin.apply(run_topology("r", limits), update=True)

    return change


async def check_that_nothing_is_lost(broker, steps: int) -> None:
    found = await account(broker, staleness_bound=STALENESS)
    assert (found.steps, found.groups.trained) == (steps, steps * GROUPS)
    assert (found.unexplained, found.doubled, found.dead_letters) == (0, 0, 0)


async def test_groups_that_would_not_all_find_room_are_held_back_and_work_that_is_begun_never_is(opened, tmp_path):
    async with opened(LIMITS) as broker:
        loop = SmallLoop(broker, tmp_path, tokens=TOKENS, max_staleness=STALENESS, bounded=True)
        await loop.run(STEPS)
        await check_that_nothing_is_lost(broker, STEPS)
    assert loop.most_bytes[1] < BULK_STOP_AT * LIMITS.payload_max_bytes, "nobody who had begun had to wait for room"
    assert loop.sampling.state.issue_below is not None


async def test_without_that_bound_they_fill_the_store_and_a_higher_limit_lets_them_go_on_without_loss(
    opened, tmp_path, wait_until, raise_limit
):
    async with opened(LIMITS) as broker, anyio.create_task_group() as tasks:
        loop = SmallLoop(broker, tmp_path, tokens=TOKENS, max_staleness=STALENESS)
        tasks.start_soon(loop.run, STEPS)
        await wait_until(lambda: "blocked: store full" in loop.broker.patience.blocked)
        assert loop.sampling.state.num_trained < STEPS
        await raise_limit(8 * 2**20)
        await wait_until(lambda: loop.sampling.state.num_trained == STEPS)
    async with opened(msgspec.structs.replace(LIMITS, payload_max_bytes=8 * 2**20)) as broker:
        await check_that_nothing_is_lost(broker, STEPS)


async def test_a_store_without_room_for_a_step_says_so_and_goes_on_when_it_is_larger(
    opened, tmp_path, wait_until, raise_limit
):
    tiny = msgspec.structs.replace(LIMITS, payload_max_bytes=100_000)
    async with opened(tiny) as broker, anyio.create_task_group() as tasks:
        loop = SmallLoop(broker, tmp_path, tokens=TOKENS, max_staleness=STALENESS, bounded=True)
        metrics = loop.metrics["retention"]
        tasks.start_soon(loop.run, STEPS)
        await wait_until(lambda: "room for 0 more groups" in metrics.labels.get("store_error", ""))
        await wait_until(lambda: "bound by store full" in loop.metrics["sampling"].report().waiting_for)
        assert metrics.report().waiting_for.startswith("blocked: store full")
        assert (metrics.gauges["blocked"], metrics.gauges["room_groups"]) == (1.0, 0.0)
        await raise_limit(8 * 2**20)
        await wait_until(lambda: loop.sampling.state.num_trained == STEPS)
        assert "store_error" not in metrics.labels
    async with opened(msgspec.structs.replace(LIMITS, payload_max_bytes=8 * 2**20)) as broker:
        await check_that_nothing_is_lost(broker, STEPS)
