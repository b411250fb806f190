"""Which names of dead launch workers may be removed: those through which nothing runs any more."""

import pytest

from broker.memory import MemoryBroker, MemoryServer
from ops.workers.orphans import unused_names
from pipeline.log import RunLog
from schemas.messages.rollout import EpisodeClass, EpisodeEnded, EpisodeLaunched


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


async def test_a_name_is_kept_while_an_episode_runs_through_it(log) -> None:
    for message in (_launched(0, "a"), _launched(1, "b"), _launched(2, "b"), _ended(0), _ended(1)):
        await log.publish(message)
    assert await unused_names(log, ["a", "b", "never-used"]) == ["a", "never-used"]


async def test_names_of_living_workers_are_not_looked_at(log) -> None:
    await log.publish(_launched(0, "living"))
    assert await unused_names(log, []) == []
