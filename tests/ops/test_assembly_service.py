"""Assembly as a worker runs it: what the fold decides about a stall, the worker carries out."""

import anyio
import pytest

from broker.memory import MemoryBroker, MemoryServer
from ops.config import decode_config
from ops.run_folder import Endpoints, RunFolder
from ops.wiring import run_service
from ops.workers.context import WorkerContext
from pipeline.log import RunLog
from schemas.ids import group_id, row_id
from schemas.messages.rollout import EpisodeClass, Row, Trajectory
from schemas.messages.sampling import GroupIssued, RunStarted
from schemas.payload import PayloadRef
from schemas.topics import STEP_ASSEMBLED
from stages.assembly.fold import StalledError


def context_of(server, tmp_path, **run):
    config = decode_config(
        {
            "run": {"id": "r", **run},
            "streams": [{"name": "words", "stream_id": "words", "sampling_weight": 1.0}],
            "arena": {"url": "local"},
            "sampling": {"groups_per_step": 1, "slots_per_group": 2, "tick_period_s": 0.01},
            "assembly": {"filter_zero_spread": True, "stall": {"rounds": 1, "seconds": 0.03}},
        }
    )
    return WorkerContext(RunFolder(tmp_path), config, Endpoints(run="r"), MemoryBroker(server, "r"))


async def publish_group(log, ordinal, rewards):
    await log.publish(
        GroupIssued(group=group_id(ordinal), ordinal=ordinal, stream="words", data_id="d", num_slots=len(rewards))
    )
    for slot, reward in enumerate(rewards):
        row = Row(
            row=row_id(group_id(ordinal), slot, 0),
            tokens=PayloadRef(store="run", id=f"{ordinal:016x}{slot:016x}", size_bytes=1),
            num_tokens=20,
            num_loss_tokens=10,
            min_version=0,
            max_version=0,
            reward=reward,
        )
        await log.publish(
            Trajectory(
                group=group_id(ordinal),
                slot=slot,
                attempt=0,
                session="s",
                stream="words",
                data_id="d",
                outcome=EpisodeClass.SCORED,
                rejected=False,
                rows=[row],
                reward=reward,
            )
        )


async def test_a_stall_ends_the_worker_and_a_new_start_goes_on_past_it(tmp_path):
    server = MemoryServer()
    stalled = context_of(server, tmp_path)
    await publish_group(stalled.log, 0, [1.0, 1.0])
    with anyio.fail_after(20), pytest.raises(ExceptionGroup) as raised:
        await run_service("assembly", stalled)
    assert raised.group_contains(StalledError, match="zero_spread: 1")

    await stalled.log.publish(RunStarted(ordinal=1, config_json=b"{}", config_digest="", headrace_version="0"))
    again = context_of(server, tmp_path)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run_service, "assembly", again)
        await publish_group(again.log, 1, [1.0, 0.0])
        with anyio.fail_after(20):
            async with RunLog(again.broker).read([STEP_ASSEMBLED]) as entries:
                step = (await anext(aiter(entries))).message
        again.drain()
    assert step.groups == [group_id(1)]


async def test_without_a_new_start_a_stalled_run_stays_ended(tmp_path):
    server = MemoryServer()
    await publish_group(context_of(server, tmp_path).log, 0, [1.0, 1.0])
    for _ in range(2):
        with anyio.fail_after(20), pytest.raises(ExceptionGroup) as raised:
            await run_service("assembly", context_of(server, tmp_path))
        assert raised.group_contains(StalledError)


async def test_figures_of_the_latest_step_and_of_each_stream_are_in_the_workers_report(tmp_path):
    context = context_of(MemoryServer(), tmp_path)
    await publish_group(context.log, 0, [1.0, 0.0])
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run_service, "assembly", context)
        with anyio.fail_after(20):
            async with RunLog(context.broker).read([STEP_ASSEMBLED]) as entries:
                await anext(aiter(entries))
        context.drain()
    gauges = context._metrics[0].report().gauges
    assert (gauges["reward_mean"], gauges["words.reward_mean"], gauges["words.usable_slots"]) == (0.5, 0.5, 2)
    assert gauges["folded_sequence"] >= 3


async def test_a_run_from_another_makes_no_ticks_of_its_own(tmp_path):
    server = MemoryServer()
    context = context_of(server, tmp_path, from_run="another")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run_service, "assembly", context)
        await publish_group(context.log, 0, [1.0, 0.0])
        with anyio.fail_after(20):
            async with RunLog(context.broker).read([STEP_ASSEMBLED]) as entries:
                await anext(aiter(entries))
        context.drain()
    async with context.broker.read(["hr.r.fold.tick.>"], follow=False) as records:
        assert [record async for record in records] == []
