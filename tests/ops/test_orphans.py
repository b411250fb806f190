"""Which names of dead launch workers may be removed: those through which nothing runs any more."""

import pytest

from broker.memory import MemoryBroker, MemoryServer
from ops.workers.orphans import left_names
from pipeline.log import RunLog
from schemas.messages.rollout import EpisodeClass, EpisodeEnded, EpisodeLaunched
from stages.clients.arena.registration import is_name_of_worker, session_model_name


def _launched(slot: int, name: str) -> EpisodeLaunched:
    return EpisodeLaunched(group="g0000000", slot=slot, attempt=0, launch_try=0, session=f"s{slot}", model_name=name)


def _ended(slot: int) -> EpisodeEnded:
    return EpisodeEnded(
        group="g0000000", slot=slot, attempt=0, stream="s", data_id="d", session=f"s{slot}",
        outcome=EpisodeClass.SCORED, final=True, status="DONE",
    )  # fmt: skip


@pytest.fixture
async def log():
    return RunLog(MemoryBroker(MemoryServer(), "run"))


def _is_dead(name: str) -> bool:
    return name.startswith("dead-")


async def test_a_name_is_kept_while_an_episode_runs_through_it(log) -> None:
    for message in (_launched(0, "dead-a"), _launched(1, "dead-b"), _launched(2, "dead-b"), _ended(0), _ended(1)):
        await log.publish(message)
    found = await left_names(log, _is_dead)
    assert (found.unused, found.used) == (["dead-a"], ["dead-b"])


async def test_names_of_living_workers_are_not_looked_at(log) -> None:
    await log.publish(_launched(0, "living"))
    found = await left_names(log, _is_dead)
    assert (found.unused, found.used) == ([], [])


async def test_a_dead_workers_names_for_every_gateway_are_found(log) -> None:
    def name(worker: str, gateway_url: str) -> str:
        return session_model_name("run", arena_url="http://a", gateway_url=gateway_url, worker=worker)

    def is_dead(found: str) -> bool:
        return is_name_of_worker(found, "run", arena_url="http://a", worker="launch.n1.0")

    gateways = ["http://n1:8000", "http://n2:8000", "http://n3:8000"]
    for slot, gateway_url in enumerate(gateways):
        await log.publish(_launched(2 * slot, name("launch.n1.0", gateway_url)))
        await log.publish(_launched(2 * slot + 1, name("launch.n1.1", gateway_url)))
        await log.publish(_ended(2 * slot))
    found = await left_names(log, is_dead)
    assert (set(found.unused), found.used) == ({name("launch.n1.0", gateway) for gateway in gateways}, [])
