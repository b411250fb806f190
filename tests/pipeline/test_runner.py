from __future__ import annotations

import anyio
import pytest

from broker.api import ConsumerSettings
from broker.memory import MemoryBroker, MemoryServer
from pipeline.delivery import RetryPolicy
from pipeline.errors import ContractError, RefusedError
from pipeline.metrics import Metrics
from pipeline.runner import RunnerSettings, StageRunner
from pipeline.stage import bind, stage
from schemas.messages.sampling import DeadLetter, EpisodeRequested, GroupIssued
from schemas.topics import DEAD_LETTER, EPISODE_REQUESTED, GROUP_ISSUED

FAST = RetryPolicy(max_attempts=3, first_delay_s=0.001, max_delay_s=0.001)
SETTINGS = RunnerSettings(consumer=ConsumerSettings(ack_wait_s=5.0), drain_deadline_s=1.0)


def a_stage(function, **options):
    return stage(consumes=GROUP_ISSUED, produces=(EPISODE_REQUESTED,), policy=FAST, **options)(function)


async def test_a_stage_is_called_as_a_plain_function(fan) -> None:
    async def spread(issued: GroupIssued, *, extra: int) -> list[EpisodeRequested]:
        return fan(issued) * extra

    issued = GroupIssued(group="g0000000", ordinal=0, stream="s", data_id="d", num_slots=3)
    assert len(await a_stage(spread)(issued, extra=2)) == 6


def test_a_missing_or_unknown_port_is_told_before_anything_runs() -> None:
    async def spread(issued: GroupIssued, *, port: int) -> list[EpisodeRequested]:
        return []

    with pytest.raises(
        TypeError, match=r"stage spread: missing a required keyword-only argument: 'port'|missing a required"
    ):
        bind(a_stage(spread))
    with pytest.raises(TypeError, match="prt"):
        bind(a_stage(spread), port=1, prt=1)


async def test_outputs_are_stored_before_the_input_is_acknowledged(
    broker: MemoryBroker, metrics: Metrics, log, fan, wait_until
) -> None:
    async def spread(issued: GroupIssued) -> list[EpisodeRequested]:
        return fan(issued)

    runner = StageRunner(bind(a_stage(spread)), broker, metrics, SETTINGS)
    for ordinal in range(5):
        await log.issue(ordinal)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(runner.run)
        await wait_until(lambda: metrics.succeeded == 5)
        runner.drain()
    assert len(await log.subjects("hr.demo.episode.requested.>")) == 10
    assert metrics.published == 10
    (consumer,) = await broker.consumers()
    assert (consumer.num_pending, consumer.num_ack_pending) == (0, 0)


async def test_a_repeated_delivery_adopts_what_stands(broker: MemoryBroker, log, fan, wait_until) -> None:
    async def spread(issued: GroupIssued) -> list[EpisodeRequested]:
        return fan(issued)

    await log.issue(0)
    for name in ("first", "second"):  # two durables see the same input, as after a lost acknowledgement
        metrics = Metrics("demo", name)
        definition = a_stage(spread)
        definition.name = name  # type: ignore[misc] - the test needs two durables of one function
        runner = StageRunner(bind(definition), broker, metrics, SETTINGS)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(runner.run)
            await wait_until(lambda m=metrics: m.succeeded == 1)
            runner.drain()
    assert metrics.adopted == 2
    assert len(await log.subjects("hr.demo.episode.requested.>")) == 2


async def test_an_undecodable_message_is_a_dead_letter_and_the_loop_goes_on(
    broker, metrics, log, fan, wait_until
) -> None:
    async def spread(issued: GroupIssued) -> list[EpisodeRequested]:
        return fan(issued)

    await broker.publish("hr.demo.group.issued.bad", b"\xff\x00")
    await log.issue(1)
    runner = StageRunner(bind(a_stage(spread)), broker, metrics, SETTINGS)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(runner.run)
        await wait_until(lambda: metrics.succeeded == 1 and metrics.dead == 1)
        runner.drain()
    (letter,) = await log.messages(DEAD_LETTER)
    assert isinstance(letter, DeadLetter)
    assert (letter.reason, letter.attempts, letter.data) == ("undecodable", 1, b"\xff\x00")


async def test_a_failing_message_is_retried_then_given_up_and_its_slots_end(
    broker, metrics, log, fan, wait_until
) -> None:
    calls: list[str] = []

    async def spread(issued: GroupIssued) -> list[EpisodeRequested]:
        calls.append(issued.group)
        if issued.ordinal == 0:
            raise ValueError("always")
        return []

    definition = a_stage(spread, gave_up=lambda issued, reason: fan(issued)[:1])
    await log.issue(0)
    await log.issue(1)
    runner = StageRunner(bind(definition), broker, metrics, SETTINGS)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(runner.run)
        await wait_until(lambda: metrics.dead == 1)
        runner.drain()
    assert calls.count("g0000000") == 3
    assert calls.count("g0000001") == 1
    (letter,) = await log.messages(DEAD_LETTER)
    assert letter.reason == "attempts"
    assert "always" in letter.error
    assert len(await log.subjects("hr.demo.episode.requested.>")) == 1


async def test_a_refused_message_is_given_up_at_once(broker, metrics, log, wait_until) -> None:
    async def spread(issued: GroupIssued) -> list[EpisodeRequested]:
        raise RefusedError("never")

    await log.issue(0)
    runner = StageRunner(bind(a_stage(spread)), broker, metrics, SETTINGS)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(runner.run)
        await wait_until(lambda: metrics.dead == 1)
        runner.drain()
    (letter,) = await log.messages(DEAD_LETTER)
    assert (letter.reason, letter.attempts) == ("refused", 1)


async def test_a_broken_contract_stops_the_worker_and_loses_nothing(broker, metrics, log) -> None:
    async def spread(issued: GroupIssued) -> list[EpisodeRequested]:
        raise ContractError("must not go on")

    await log.issue(0)
    with pytest.RaisesGroup(pytest.RaisesExc(ContractError, match="must not go on"), flatten_subgroups=True):
        await StageRunner(bind(a_stage(spread)), broker, metrics, SETTINGS).run()
    (consumer,) = await broker.consumers()
    assert consumer.num_ack_pending == 1
    assert await log.messages(DEAD_LETTER) == []


async def test_an_undeclared_output_is_a_broken_contract(broker, metrics, log) -> None:
    async def spread(issued: GroupIssued) -> list[GroupIssued]:
        return [issued]

    await log.issue(0)
    with pytest.RaisesGroup(
        pytest.RaisesExc(ContractError, match="returned a GroupIssued; it declares to produce EpisodeRequested"),
        flatten_subgroups=True,
    ):
        await StageRunner(bind(a_stage(spread)), broker, metrics, SETTINGS).run()


async def test_a_drain_finishes_what_is_held(broker, metrics, log, wait_until) -> None:
    begun, go = anyio.Event(), anyio.Event()

    async def spread(issued: GroupIssued) -> list[EpisodeRequested]:
        begun.set()
        await go.wait()
        return []

    await log.issue(0)
    runner = StageRunner(bind(a_stage(spread)), broker, metrics, SETTINGS)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(runner.run)
        await begun.wait()
        runner.drain()
        go.set()
    assert metrics.succeeded == 1


async def test_a_full_store_blocks_and_loses_nothing(metrics, fan, wait_until) -> None:
    server = MemoryServer(max_bytes=900)
    broker = MemoryBroker(server, "demo")

    async def spread(issued: GroupIssued) -> list[EpisodeRequested]:
        return fan(issued)

    issued = GroupIssued(group="g0000000", ordinal=0, stream="s", data_id="d", num_slots=6)
    await broker.publish(GROUP_ISSUED.subject("demo", issued), GROUP_ISSUED.encode(issued))
    runner = StageRunner(bind(a_stage(spread)), broker, metrics, SETTINGS)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(runner.run)
        await wait_until(lambda: metrics.report().waiting_for == "blocked: store full")
        server.run("demo").max_bytes = 100_000
        await wait_until(lambda: metrics.succeeded == 1)
        runner.drain()
    assert metrics.published == 6
    assert metrics.dead == 0
