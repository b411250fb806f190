"""Runs that are many times larger than their store."""

from __future__ import annotations

from contextlib import suppress

import anyio
import msgspec
import pytest
from small_loop import GROUPS, QUICK, SLOTS, SmallLoop, assembly_fold

from broker.errors import StoreFullError
from broker.topology import RunLimits
from ops.accounts import account
from ops.logtools.sources import LiveSource
from ops.report.gather import gather
from ops.retention.follow import LogFollower
from ops.retention.ledger import Ledger
from ops.retention.owner import Readers, RetentionOwner
from pipeline.fold import FoldRunner
from pipeline.headroom import STORE_LABEL
from pipeline.holds import held, read_mark
from pipeline.metrics import Metrics
from schemas.config import RetentionSection
from schemas.messages.training import FoldCheckpoint

LIMITS = RunLimits(log_max_bytes=150_000, payload_max_bytes=300_000, state_max_bytes=4 * 2**20)
STEPS = 120


async def test_a_run_that_is_many_times_larger_than_its_store_stays_within_it_and_is_accounted_for(opened, tmp_path):
    async with opened(LIMITS) as broker:
        loop = SmallLoop(broker, tmp_path)
        await loop.run(STEPS)
        found = await account(broker, staleness_bound=1)
        figures = await gather(LiveSource(broker))
        mark = await read_mark(broker)
        status = await broker.log_status()
    assert figures.account.groups == found.groups
    assert (figures.account.steps, figures.account.unexplained) == (STEPS, 0)
    assert figures.purged_up_to > 0
    assert 0 < len(figures.steps) < STEPS
    assert figures.rates[0].since_start_s > 0.1 * figures.rates[-1].since_start_s
    assert status.last_sequence * 200 > 2 * LIMITS.log_max_bytes, "it would not have fitted"
    assert loop.most_bytes[0] < LIMITS.log_max_bytes
    assert loop.most_bytes[1] < LIMITS.payload_max_bytes
    assert mark is not None
    assert mark.sequence > status.last_sequence // 2
    assert (found.steps, found.groups.trained, found.trained_rows) == (STEPS, STEPS * GROUPS, STEPS * GROUPS * SLOTS)
    assert (found.unexplained, found.doubled, found.dead_letters) == (0, 0, 0)
    assert len(found.reward_by_step) == STEPS
    assert found.episodes.requested == STEPS * GROUPS * SLOTS


async def test_folding_again_from_a_checkpoint_after_a_purge_gives_the_same_bytes(opened, tmp_path, wait_until):
    roomy = RunLimits(log_max_bytes=300_000, payload_max_bytes=600_000, state_max_bytes=4 * 2**20)
    async with opened(roomy) as broker, anyio.create_task_group() as tasks:
        loop = SmallLoop(broker, tmp_path, retention=msgspec.structs.replace(QUICK, purge_above=0.1))
        done = anyio.Event()

        async def run() -> None:
            await loop.run(40)
            done.set()

        tasks.start_soon(run)

        async def purged() -> bool:
            mark = await read_mark(broker)
            return mark is not None and mark.sequence > 100

        await wait_until(purged)
        found = await broker.load_state("fold.assembly")
        assert found is not None
        old = msgspec.msgpack.decode(found[0], type=FoldCheckpoint)
        state = bytes(await broker.payloads.get(old.state))
        async with held(broker, "test", sequence=old.sequence + 1, what="a test"):
            await done.wait()
            await broker.payloads.put(state)
            await broker.save_state("fold.assembly", found[0])
            again = FoldRunner(assembly_fold("r"), loop.broker, Metrics("r", "assembly"))
            tasks.start_soon(again.run)
            await wait_until(lambda: again.sequence >= loop.assembly.sequence)
            again.drain()
        assert again.state == loop.assembly.state
        assert again.metrics.adopted > 10
        assert again.metrics.published == 0, "everything that it computes stands already, with the same bytes"


async def test_a_full_store_blocks_the_run_names_who_holds_it_and_is_left_without_loss(opened, tmp_path, wait_until):
    # What is under way when sampling stops (16 groups) has room above the 80 %, as in a store of any real size.
    roomy, steps = RunLimits(log_max_bytes=240_000, payload_max_bytes=480_000, state_max_bytes=4 * 2**20), 80
    async with opened(roomy) as broker, anyio.create_task_group() as tasks:
        loop = SmallLoop(broker, tmp_path)
        metrics = loop.metrics["retention"]
        async with held(broker, "why", sequence=1, what="why of a test"):
            tasks.start_soon(loop.run, steps)
            await wait_until(lambda: "store_error" in metrics.labels)
            await wait_until(lambda: "bound by store full" in loop.metrics["sampling"].report().waiting_for)
            await wait_until(lambda: not loop.sampling.state.running and not loop.sampling.state.waiting)
            assert "the mark stands at 1, held by why of a test" in metrics.labels["store_error"]
            assert metrics.report().waiting_for == "blocked: store full; held by why of a test"
            assert 0 < loop.sampling.state.num_trained < steps
            status = await broker.log_status()
            assert 0.7 * roomy.log_max_bytes < max(status.size_bytes, status.payload_bytes / 2) < roomy.log_max_bytes
        await wait_until(lambda: loop.sampling.state.num_trained == steps)
    async with opened(roomy) as broker:
        found = await account(broker, staleness_bound=1)
        assert (found.steps, found.groups.trained) == (steps, steps * GROUPS)
        assert (found.unexplained, found.doubled, found.dead_letters) == (0, 0, 0)


async def test_a_log_that_takes_no_word_more_is_told_all_the_same(opened):
    async with opened(RunLimits(log_max_bytes=240_000, payload_max_bytes=480_000, state_max_bytes=4 * 2**20)) as broker:
        number, size = 0, 20_000
        while size:
            try:
                await broker.publish(f"hr.r.noise.{number}", bytes(size))
                number += 1
            except StoreFullError:
                size //= 2
        metrics = Metrics("r", "retention")
        nobody = Readers(folds=(), durables=(), trains=False)
        owner = RetentionOwner(broker, broker.payloads, metrics, nobody, RetentionSection())
        follower = LogFollower(broker, await Ledger.restore(broker), trains=False)
        with pytest.raises(StoreFullError):  # sampling is told once there is room for it
            await owner.look(follower)
        assert metrics.labels[STORE_LABEL].startswith("blocked: store full: log 0.2 MB of 0.2 (")
        assert metrics.gauges["blocked"] == 1
        await broker.purge_below(number + 1, pattern="hr.r.noise.>")
        await owner.look(follower)
        assert STORE_LABEL not in metrics.labels
        assert metrics.gauges["blocked"] == 0


@pytest.mark.parametrize(("purge_above", "purges"), [(0.5, True), (1.0, False)])
async def test_what_is_never_to_be_purged_stays_also_in_a_log_that_is_full_to_the_last_byte(
    opened, purge_above, purges
):
    limits = RunLimits(log_max_bytes=60_000, payload_max_bytes=480_000, state_max_bytes=4 * 2**20)
    async with opened(limits) as broker, anyio.create_task_group() as tasks:
        number, size = 0, 8_000
        while size:
            try:
                await broker.publish(f"hr.r.noise.{number}", bytes(size))
                number += 1
            except StoreFullError:
                size //= 2
        settings = RetentionSection(purge_above=purge_above, sampling_stops_at=0.95)
        owner = RetentionOwner(
            broker, broker.payloads, Metrics("r", "retention"), Readers(folds=(), durables=(), trains=False), settings
        )
        follower = LogFollower(broker, await Ledger.restore(broker), trains=False)
        tasks.start_soon(follower.run)
        await follower.caught_up.wait()
        with suppress(StoreFullError):
            await owner.look(follower)
        mark = await read_mark(broker)
        assert (mark is not None and mark.sequence > 0) is purges
        tasks.cancel_scope.cancel()


async def test_a_run_goes_on_after_a_purge_where_all_its_processes_died(opened, tmp_path):
    for steps in (20, 40):
        async with opened(LIMITS) as broker:
            await SmallLoop(broker, tmp_path).run(steps)
    async with opened(LIMITS) as broker:
        found = await account(broker, staleness_bound=1)
        assert await read_mark(broker) is not None
        assert (found.steps, found.unexplained, found.doubled) == (40, 0, 0)
        assert found.groups.trained == 40 * GROUPS
