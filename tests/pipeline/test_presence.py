from __future__ import annotations

import pytest

from broker.memory import MemoryBroker, MemoryServer
from pipeline.presence import Presence, PresenceLease, dead_nodes, forget_missing, missing, obituary, roll_call


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def broker() -> MemoryBroker:
    return MemoryBroker(MemoryServer(), "r")


@pytest.fixture
def clock() -> Clock:
    return Clock()


def _lease(broker: MemoryBroker, clock: Clock, slot: str = "rewards.a.0", job: str = "") -> PresenceLease:
    return PresenceLease(broker, slot, ["rewards"], now=clock, environ={"SLURM_JOB_ID": job} if job else {})


async def _dead(broker: MemoryBroker, clock: Clock, heard: frozenset[str] = frozenset()) -> list[Presence]:
    return missing(await roll_call(broker), heard=heard, now=clock())


async def test_a_process_that_vanished_without_a_word_is_known_dead_with_its_batch_job(broker, clock) -> None:
    await _lease(broker, clock, job="4711").renew()
    clock.now += 14.0
    assert await _dead(broker, clock) == []
    clock.now += 29.0
    (dead,) = await _dead(broker, clock)
    text = obituary(dead, now=clock())
    assert text.startswith(f"rewards on {dead.host} (pid {dead.pid}, Slurm job 4711): not seen for 43 s")


async def test_one_that_renews_its_lease_lives(broker, clock) -> None:
    lease = _lease(broker, clock)
    for _ in range(5):
        await lease.renew()
        clock.now += 10.0
    assert await _dead(broker, clock) == []


async def test_one_whose_reports_are_heard_lives_whatever_its_clock_says(broker, clock) -> None:
    await _lease(broker, clock).renew()
    clock.now += 3600.0
    (presence,) = await roll_call(broker)
    assert await _dead(broker, clock, frozenset({presence.worker})) == []


async def test_one_that_left_in_good_order_is_not_missed(broker, clock) -> None:
    lease = _lease(broker, clock)
    await lease.renew()
    await lease.leave()
    clock.now += 3600.0
    assert await roll_call(broker) == []


async def test_a_successor_takes_the_lease_of_its_slot_over(broker, clock) -> None:
    await _lease(broker, clock).renew()
    clock.now += 60.0
    await _lease(broker, clock).renew()
    assert await _dead(broker, clock) == []
    assert len(await roll_call(broker)) == 1


async def test_a_run_that_starts_anew_forgets_the_dead_and_keeps_the_living(broker, clock) -> None:
    await _lease(broker, clock, "rewards.a.0").renew()
    clock.now += 60.0
    await _lease(broker, clock, "rewards.b.0").renew()
    await forget_missing(broker, now=clock())
    assert [presence.slot for presence in await roll_call(broker)] == ["rewards.b.0"]


def _seen(host: str, slot: str, renewed: float) -> Presence:
    return Presence(slot=slot, stages=["s"], host=host, pid=1, since_unix_s=0.0, renewed_unix_s=renewed)


async def test_a_job_that_slurm_calls_completed_is_dead_when_no_process_of_it_said_an_end(broker, clock) -> None:
    await _lease(broker, clock, job="4711").renew()
    clock.now += 20.0
    (dead,) = await _dead(broker, clock)
    assert ", Slurm job 4711 COMPLETED): not seen for 20 s" in obituary(
        dead, now=clock(), job_states={"4711": "COMPLETED"}
    )


def test_nodes_on_one_host_are_told_apart_by_their_names() -> None:
    presences = [
        Presence(slot=node, stages=["s"], host="h", pid=1, node=node, since_unix_s=0.0, renewed_unix_s=renewed)
        for node, renewed in (("gpu-1", 0.0), ("gpu-2", 100.0))
    ]
    dead = missing(presences, heard=frozenset(), now=100.0)
    assert dead_nodes(presences, dead) == ["gpu-1"]
    assert obituary(dead[0], now=100.0).startswith("s on node gpu-1 (h, pid 1): not seen for 100 s")


def test_a_node_is_dead_when_none_of_its_processes_is_left() -> None:
    presences = [_seen("a", "1", 0.0), _seen("a", "2", 0.0), _seen("b", "3", 0.0), _seen("b", "4", 100.0)]
    dead = missing(presences, heard=frozenset(), now=100.0)
    assert [one.slot for one in dead] == ["1", "2", "3"]
    assert dead_nodes(presences, dead) == ["a"]
