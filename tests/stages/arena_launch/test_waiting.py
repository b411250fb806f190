"""What an episode waits for before and while it plays: its weights, an Arena that is away; and groups that close meanwhile."""

import contextlib

import anyio
import pytest

from schemas.config_arena import ArenaSettings, StreamConfig
from schemas.messages.rollout import EpisodeClass
from stages.arena_launch.arena_runner import ArenaRunner
from stages.arena_launch.groups import ClosedGroups
from stages.arena_launch.polling import pause
from stages.clients.arena.errors import (
    ArenaBusyError,
    ArenaConnectionError,
    ArenaLaunchLostError,
)
from stages.clients.arena.wire import ArenaStream

S0, S1 = "g0000001-2-0-0", "g0000001-2-0-1"


@contextlib.asynccontextmanager
async def playing(world, requested=None):
    """An episode that is under way; what it ends with."""
    ends: list = []

    async def episode() -> None:
        ends.extend(await world.run(requested))

    with anyio.fail_after(10):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(episode)
            yield ends


async def looked_at(world, num_looks: int) -> None:
    while world.num_looks < num_looks:
        await anyio.lowlevel.checkpoint()


async def test_an_episode_whose_group_closes_while_the_arena_is_busy_is_not_posted_again(world) -> None:
    groups = ClosedGroups()

    def busy():
        groups.close("g0000001")
        raise ArenaBusyError("busy", status=429, retry_after="37")

    world.launch_answers = [busy]
    world.ports = {"groups": groups}
    (end,) = await world.run()
    assert (end.status, end.final, len(world.launches)) == ("LOCAL_WAIT_CANCELLED", True, 1)
    assert f"close {S0}" in world.events


async def test_a_surplus_episode_of_a_closed_group_is_cancelled_here_and_never_awaited(world, answer) -> None:
    groups = ClosedGroups()
    world.results = [answer("AGENT_RUNNING")]
    world.settings = {"poll_interval_s": 3600}
    world.ports = {"pause": pause, "groups": groups}
    async with playing(world) as ends:
        while "accepted 0" not in world.events:
            await anyio.lowlevel.checkpoint()
        groups.close("g0000001")
    (end,) = ends
    assert (end.status, end.outcome, end.final, end.score) == ("LOCAL_WAIT_CANCELLED", EpisodeClass.SYSTEM, True, None)
    assert f"close {S0}" in world.events


async def test_an_episode_of_a_group_that_is_closed_already_is_not_launched(world) -> None:
    groups = ClosedGroups()
    groups.close("g0000001")
    world.ports = {"groups": groups}
    (end,) = await world.run()
    assert (end.status, end.final, world.launches, world.events) == ("LOCAL_WAIT_CANCELLED", True, [], [])


def test_closed_groups_forget_their_waiters() -> None:
    groups = ClosedGroups()
    first, second = groups.join("g"), groups.join("g")
    assert first is second
    groups.leave("g")
    groups.close("g")
    assert second.is_set()
    groups.leave("g")
    assert groups.join("g").is_set()
    assert not groups.join("h").is_set()


async def test_an_episode_whose_weights_are_on_their_way_is_launched_when_they_serve(world) -> None:
    async with playing(world, world.requested(min_version=5)) as ends:
        while len(world.asked_versions) < 2:
            await anyio.lowlevel.checkpoint()
        assert (world.events, world.launches) == ([], [])
        assert world.metrics.gauges["waiting_for_weights"] == 1
        world.served_version = 6
    (end,) = ends
    assert end.outcome is EpisodeClass.SCORED
    assert world.events[0] == f"open {S0} 5"
    assert world.metrics.gauges["waiting_for_weights"] == 0


async def test_a_group_that_is_closed_while_its_weights_are_on_their_way_is_not_launched(world) -> None:
    groups = ClosedGroups()
    world.ports = {"groups": groups}
    async with playing(world, world.requested(min_version=5)) as ends:
        while not world.asked_versions:
            await anyio.lowlevel.checkpoint()
        groups.close("g0000001")
    (end,) = ends
    assert (end.status, end.final, world.launches, world.events) == ("LOCAL_WAIT_CANCELLED", True, [], [])


async def test_an_arena_that_is_away_is_waited_for_with_its_name_and_takes_no_delivery(world, answer) -> None:
    world.away = ArenaConnectionError("GET /streams: connection refused")
    world.launch_answers = [ArenaLaunchLostError("connection refused"), answer("PENDING")]
    async with playing(world) as ends:
        await looked_at(world, 3)
        assert world.metrics.report().waiting_for == "the Arena at http://arena: GET /streams: connection refused"
        assert len(world.launches) == 1
        world.away = None
    (end,) = ends
    assert (end.outcome, end.attempt, end.session) == (EpisodeClass.SCORED, 0, S1)
    assert world.metrics.report().waiting_for == ""
    assert world.events.count(f"close {S0}") == 1


async def test_a_registration_that_an_arena_that_is_away_could_not_take_is_made_when_it_is_back(world) -> None:
    world.away = world.refused_reach = ArenaBusyError("no upstream", status=503)
    async with playing(world) as ends:
        await looked_at(world, 2)
        world.away = world.refused_reach = None
    (end,) = ends
    assert (end.outcome, end.session) == (EpisodeClass.SCORED, S0)
    assert "extra_launches" not in world.metrics.gauges


async def test_a_registration_that_fails_while_the_arena_answers_is_tried_again_here(world) -> None:
    world.refused_reach = ArenaBusyError("no upstream", status=503)
    async with playing(world) as ends:
        await looked_at(world, 2)
        assert "no upstream" in world.metrics.report().waiting_for
        world.refused_reach = None
    assert [end.outcome for end in ends] == [EpisodeClass.SCORED]


@pytest.mark.parametrize("is_sent", [True, False])
async def test_a_group_that_closes_while_the_arena_is_away_ends_its_episodes_and_their_sessions(world, is_sent) -> None:
    groups = ClosedGroups()
    world.ports = {"groups": groups}
    world.away = ArenaConnectionError("away")
    if is_sent:
        world.launch_answers = [ArenaLaunchLostError("away")]
    else:
        world.refused_reach = ArenaConnectionError("away")
    async with playing(world) as ends:
        await looked_at(world, 1)
        groups.close("g0000001")
    (end,) = ends
    assert (end.status, end.final) == ("LOCAL_WAIT_CANCELLED", True)
    assert world.events.count(f"close {S0}") == 1


async def test_a_result_that_stands_in_an_arena_that_is_away_at_the_deadline_is_waited_for(world, answer) -> None:
    world.away = ArenaConnectionError("away")
    world.results = [ArenaConnectionError("away")]
    world.settings = {"task_timeout_s": 0.05}
    world.ports = {"pause": pause}
    async with playing(world) as ends:
        await looked_at(world, 2)
        world.results = [answer("DONE", 1.0)]
        world.away = None
    (end,) = ends
    assert (end.outcome, end.attempt, len(world.launches)) == (EpisodeClass.SCORED, 0, 1)


async def test_many_episodes_that_wait_for_an_arena_ask_it_once_a_second() -> None:
    asked: list[str] = []

    class Away:
        async def get_stream(self, stream_id: str) -> ArenaStream:
            asked.append(stream_id)
            raise ArenaConnectionError("away")

    runner = ArenaRunner(Away(), None, ArenaSettings(), place="http://arena", asked_again_s=3600)
    told: set[str] = set()

    async def ask() -> None:
        told.add(await runner.away(StreamConfig(name="s", stream_id="arena-s")))

    async with anyio.create_task_group() as tasks:
        for _ in range(100):
            tasks.start_soon(ask)
    assert (asked, told) == (["arena-s"], {"the Arena at http://arena: away"})
