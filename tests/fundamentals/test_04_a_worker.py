"""Chapter 4: what a worker does with a stage.

A worker reads a message, calls the stage, publishes what it returned, and only then acknowledges. That order is the whole
trick: whatever dies in between, the message comes again, and outputs that stand already are adopted by their subject.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import anyio

from broker.memory import MemoryBroker
from pipeline.delivery import RetryPolicy
from pipeline.errors import RefusedError, RetryableError
from pipeline.log import RunLog
from pipeline.metrics import Metrics
from pipeline.runner import StageRunner
from pipeline.stage import BoundStage, bind, stage
from schemas.ids import group_id
from schemas.messages.sampling import DeadLetter, EpisodeRequested, GroupIssued
from schemas.topics import DEAD_LETTER, EPISODE_REQUESTED, GROUP_ISSUED
from stages.fan_out import fan_out

WaitUntil = Callable[..., Awaitable[None]]
SOON = RetryPolicy(max_attempts=3, first_delay_s=0.001, max_delay_s=0.001)


async def issue(log: RunLog, ordinal: int) -> None:
    """Put a group of two slots on the log."""
    await log.publish(GroupIssued(group=group_id(ordinal), ordinal=ordinal, stream="s", data_id="d", num_slots=2))


async def work(
    broker: MemoryBroker, bound: BoundStage[Any], until: Callable[[Metrics], bool], wait: WaitUntil
) -> Metrics:
    """Run a worker until its counters say so."""
    metrics = Metrics(broker.run, bound.name)
    runner = StageRunner(bound, broker, metrics)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(runner.run)
        await wait(lambda: until(metrics))
        runner.drain()
    return metrics


async def slots_on(log: RunLog) -> list[tuple[str, int]]:
    """The requested episodes, as they stand."""
    async with log.read([EPISODE_REQUESTED], follow=False) as entries:
        return [(entry.message.group, entry.message.slot) async for entry in entries]


async def test_a_worker_turns_groups_into_requests(broker: MemoryBroker, log: RunLog, wait_until: WaitUntil) -> None:
    """The stage of chapter 2 on the broker of chapter 3."""
    for ordinal in range(3):
        await issue(log, ordinal)
    metrics = await work(broker, bind(fan_out), lambda m: m.succeeded == 3, wait_until)
    assert await slots_on(log) == [(group_id(ordinal), slot) for ordinal in range(3) for slot in range(2)]
    assert (metrics.received, metrics.published) == (3, 6)


async def test_a_worker_that_dies_halfway_changes_nothing(
    broker: MemoryBroker, log: RunLog, wait_until: WaitUntil
) -> None:
    """One of the two requests was published, then the worker died: the next one says the other, and adopts the first."""
    await issue(log, 0)
    await log.publish(EpisodeRequested(group=group_id(0), slot=0, attempt=0, stream="s", data_id="d"))
    metrics = await work(broker, bind(fan_out), lambda m: m.succeeded == 1, wait_until)
    assert await slots_on(log) == [(group_id(0), 0), (group_id(0), 1)]
    assert (metrics.published, metrics.adopted) == (1, 1)


async def test_an_error_is_tried_again(broker: MemoryBroker, log: RunLog, wait_until: WaitUntil) -> None:
    """The type of the error says whether waiting may help."""
    failures = [RetryableError("the engine is restarting")]

    @stage(consumes=GROUP_ISSUED, produces=(EPISODE_REQUESTED,), policy=SOON)
    async def shaky(issued: GroupIssued) -> list[EpisodeRequested]:
        if failures:
            raise failures.pop()
        return list(await fan_out(issued))

    await issue(log, 0)
    metrics = await work(broker, bind(shaky), lambda m: m.succeeded == 1, wait_until)
    assert metrics.retried == 1
    assert len(await slots_on(log)) == 2


async def test_what_can_not_be_done_becomes_a_dead_letter(
    broker: MemoryBroker, log: RunLog, wait_until: WaitUntil
) -> None:
    """It never vanishes and never blocks what comes behind it: `headrace dead list` shows it, `retry` sends it again."""

    @stage(consumes=GROUP_ISSUED, produces=(EPISODE_REQUESTED,), policy=SOON)
    async def picky(issued: GroupIssued) -> list[EpisodeRequested]:
        if issued.ordinal == 0:
            raise RefusedError("I don't do zeroes")
        return list(await fan_out(issued))

    await issue(log, 0)
    await issue(log, 1)
    await work(broker, bind(picky), lambda m: m.dead == 1 and m.succeeded == 1, wait_until)
    async with log.read([DEAD_LETTER], follow=False) as entries:
        (letter,) = [entry.message async for entry in entries]
    assert isinstance(letter, DeadLetter)
    assert (letter.stage, letter.reason, letter.attempts) == ("picky", "refused", 1)
    assert "I don't do zeroes" in letter.error
    assert GROUP_ISSUED.decode(letter.data).ordinal == 0
