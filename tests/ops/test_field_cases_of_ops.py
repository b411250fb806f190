"""Reported faults of running and stopping; PrimeIntellect-ai/prime-rl#2158 is in test_supervise.py."""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest

from broker.api import ConsumerSettings
from broker.connect import connect
from broker.embedded import embedded_server
from broker.memory import MemoryBroker, MemoryServer
from ops.config import decode_config
from ops.run_folder import Endpoints, RunFolder
from ops.supervise.process import ProcessSpec, RestartPolicy, python
from ops.supervise.supervisor import Supervisor
from ops.wiring import run_service
from ops.workers.context import WorkerContext
from schemas.ids import group_id
from schemas.messages.rollout import EpisodeClass, Trajectory
from schemas.messages.sampling import GroupIssued
from stages.assembly.fold import StalledError

# PrimeIntellect-ai/prime-rl#3015


async def publish_dead_group(context: WorkerContext, ordinal: int) -> None:
    group = group_id(ordinal)
    await context.log.publish(GroupIssued(group=group, ordinal=ordinal, stream="words", data_id="d", num_slots=2))
    for slot in range(2):
        await context.log.publish(
            Trajectory(
                group=group, slot=slot, attempt=0, session="", stream="words", data_id="d",
                outcome=EpisodeClass.SYSTEM, rejected=True, reason="HTTP 500",
            )
        )  # fmt: skip


async def test_prime_rl_3015_ten_dead_groups_in_a_row_stop_the_run_with_the_most_frequent_reason(
    tmp_path: Path,
) -> None:
    config = decode_config(
        {
            "run": {"id": "r"},
            "streams": [{"name": "words", "stream_id": "words", "sampling_weight": 1.0}],
            "arena": {"url": "local"},
            "sampling": {"groups_per_step": 1, "slots_per_group": 2, "tick_period_s": 0.01},
            "assembly": {"stall": {"rounds": 10, "seconds": 0.03}},
        }
    )
    context = WorkerContext(RunFolder(tmp_path), config, Endpoints(run="r"), MemoryBroker(MemoryServer(), "r"))
    for ordinal in range(10):
        await publish_dead_group(context, ordinal)
    with anyio.fail_after(20), pytest.raises(ExceptionGroup) as raised:
        await run_service("assembly", context)
    assert raised.group_contains(StalledError, match="too_few_usable: 10")


async def test_prime_rl_3015_an_exception_in_a_background_task_ends_the_process_and_is_reported(tmp_path: Path) -> None:
    code = """
import anyio
async def fail():
    raise RuntimeError("the sandbox answers 500")
async def work():
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(fail)
        await anyio.sleep_forever()
anyio.run(work)
"""
    once = RestartPolicy(max_restarts=0)
    spec = ProcessSpec(name="stage", argv=python("-c", code), log_file=str(tmp_path / "stage.log"), restart=once)
    async with anyio.create_task_group() as tasks:
        supervisor = Supervisor(tasks)
        await supervisor.start(spec)
        with anyio.fail_after(20):
            await supervisor.failed.wait()
    assert "exit code 1" in str(supervisor.failure)
    assert "the sandbox answers 500" in str(supervisor.failure)


# nats-io/nats.py#373


async def test_nats_py_373_a_cancelled_wait_ends_at_once_and_what_was_in_hand_comes_again(tmp_path: Path) -> None:
    patience = ConsumerSettings(ack_wait_s=1.0)
    async with (
        embedded_server(tmp_path / "nats") as server,
        connect(server.url, "r", server.connect_settings(), create=True) as broker,
    ):
        held: list[bytes] = []
        holds = anyio.Event()
        ended: list[str] = []

        async def worker(topic: str, *, hold: bool) -> None:
            try:
                async with broker.consume(topic.replace(".", "_"), [f"hr.r.{topic}.>"], patience) as deliveries:
                    async for delivery in deliveries:
                        held.append(delivery.data)
                        holds.set()
                        if hold:
                            await anyio.sleep_forever()
                        await delivery.ack()
                        return
            except anyio.get_cancelled_exc_class():
                ended.append(topic)
                raise

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lambda: worker("a.empty", hold=False))
            tasks.start_soon(lambda: worker("a.full", hold=True))
            await broker.publish("hr.r.a.full.1", b"in hand")
            with anyio.fail_after(20):
                await holds.wait()
            tasks.cancel_scope.cancel()
        assert sorted(ended) == ["a.empty", "a.full"]
        with anyio.fail_after(20):
            await worker("a.full", hold=False)
        assert held == [b"in hand", b"in hand"]
