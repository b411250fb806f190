"""The launch stage: order of what it does, faults, take-over, and what an episode's end says."""

import contextlib

import anyio
import msgspec
import pytest

from pipeline.errors import RefusedError, RetryableError
from schemas.config_arena import ArenaSettings, StreamConfig
from schemas.messages.rollout import EpisodeClass
from schemas.messages.sampling import EpisodeRequested
from stages.arena_launch.arena_runner import ArenaRunner
from stages.arena_launch.groups import ClosedGroups
from stages.arena_launch.polling import Pace, pause
from stages.arena_launch.stage import gave_up
from stages.clients.arena.errors import (
    ArenaAuthError,
    ArenaBusyError,
    ArenaConnectionError,
    ArenaLaunchLostError,
    ArenaNotFoundError,
    ArenaRefusedError,
    RewardDriftError,
    TaskResultError,
)
from stages.clients.arena.wire import ArenaStream, VersionedRef

S0, S1 = "g0000001-2-0-0", "g0000001-2-0-1"


async def test_the_intent_is_on_the_log_before_the_post_and_the_task_id_right_after(world, answer) -> None:
    world.results = [answer("AGENT_RUNNING"), answer("DONE", 0.5, raw={"why": "x"})]
    (end,) = await world.run(world.requested(min_version=3))
    assert world.events == [
        f"open {S0} 3",
        f"reach {S0}",
        "intent 0",
        "POST",
        "accepted 0",
        "poll task-1",
        "poll task-1",
        f"close {S0}",
        "leave",
    ]
    assert (end.outcome, end.final, end.status, end.score, end.session, end.task_id) == (
        EpisodeClass.SCORED,
        True,
        "DONE",
        0.5,
        S0,
        "task-1",
    )
    assert (end.trace_id, end.artifacts_uri, end.computed_at, end.raw_json) == ("tr", "a://1", "now", b'{"why":"x"}')
    launch = world.launches[0]
    assert (launch.stream_id, launch.data_id, launch.session_id, launch.model_name) == (
        "arena-s",
        "d",
        S0,
        "stream-areal-x",
    )


async def test_a_terminal_result_at_once_is_not_polled_for(world, answer) -> None:
    world.launch_answers = [answer("DONE", 1.0)]
    (end,) = await world.run()
    assert end.score == 1.0
    assert not any(event.startswith(("poll", "accepted")) for event in world.events)


async def test_a_lost_answer_goes_back_and_the_next_try_has_a_new_session_after_closing_the_former(
    world, answer
) -> None:
    world.launch_answers = [ArenaLaunchLostError("lost"), answer("PENDING", task_id="task-2")]
    with pytest.raises(RetryableError):
        await world.run()
    world.events.clear()
    (end,) = await world.run()
    assert world.events[:5] == [f"close {S0}", "forget stream-areal-x", f"open {S1} 0", f"reach {S1}", "intent 1"]
    assert end.session == S1
    assert world.metrics.gauges["extra_launches"] == 1


async def test_a_worker_killed_after_acceptance_is_followed_by_one_that_polls_the_same_task(world, answer) -> None:
    world.results = [world.killed()]
    with pytest.raises(RetryableError):
        await world.run()
    world.events.clear()
    world.results = [answer("DONE", 1.0)]
    (end,) = await world.run()
    assert world.events == ["resume stream-areal-x", "poll task-1", f"close {S0}"]
    assert (end.session, end.score, len(world.launches)) == (S0, 1.0, 1)
    assert "extra_launches" not in world.metrics.gauges


async def test_429_is_posted_again_under_the_same_session_since_nothing_was_launched(world, answer) -> None:
    world.launch_answers = [ArenaBusyError("busy", status=429), ArenaBusyError("busy", status=429), answer("PENDING")]
    (end,) = await world.run()
    assert [launch.session_id for launch in world.launches] == [S0, S0, S0]
    assert world.pauses[:2] == [1, 2]
    assert end.outcome is EpisodeClass.SCORED


async def test_429_is_posted_again_when_the_arena_asks_for_it(world, answer) -> None:
    world.launch_answers = [ArenaBusyError("busy", status=429, retry_after="37"), answer("PENDING")]
    await world.run()
    assert world.pauses[0] == 37


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


async def test_429_for_ever_goes_back_to_the_runner(world) -> None:
    world.launch_answers = [ArenaBusyError("busy", status=429)]
    with pytest.raises(RetryableError):
        await world.run()
    assert len(world.launches) == 4


async def test_a_refused_launch_is_a_system_failure_and_asks_for_the_next_attempt(world) -> None:
    world.launch_answers = [ArenaRefusedError("no such row", status=422)]
    end, again = await world.run()
    assert (end.outcome, end.final, end.status, end.score) == (EpisodeClass.SYSTEM, False, "LOCAL_LAUNCH_REFUSED", None)
    assert isinstance(again, EpisodeRequested)
    assert (again.attempt, again.slot) == (1, 2)


async def test_the_last_attempt_of_a_slot_is_final(world, answer) -> None:
    world.results = [answer("FAILED")]
    (end,) = await world.run(world.requested(attempt=2))
    assert (end.outcome, end.final) == (EpisodeClass.SYSTEM, True)


@pytest.mark.parametrize("status", ["TIMEOUT", "NO_OUTPUT"])
async def test_a_models_own_failure_is_kept_with_reward_zero_and_not_retried(world, answer, status) -> None:
    world.results = [answer(status)]
    (end,) = await world.run()
    assert (end.outcome, end.score, end.final, end.status) == (EpisodeClass.MODEL, 0.0, True, status)


async def test_the_gateways_own_system_error_overrides_a_score(world) -> None:
    world.closed = {"system_error": "engine died"}
    end, again = await world.run()
    assert (end.outcome, end.score, end.error) == (EpisodeClass.SYSTEM, None, "engine died")
    assert again.attempt == 1


@pytest.mark.parametrize(("receipt", "outcome"), [
    ({"error": {"phase": "agent", "type": "max_turns"}}, EpisodeClass.MODEL),
    ({"error": {"phase": "agent"}}, EpisodeClass.UNKNOWN),
    (ArenaConnectionError("away"), EpisodeClass.UNKNOWN),
    (None, EpisodeClass.MODEL),
])  # fmt: skip
async def test_a_receipt_is_asked_for_where_configured_and_one_that_can_not_be_read_rescues_nothing(
    world, answer, receipt, outcome
) -> None:
    world.results = [answer("HARNESS_FAILED")]
    world.closed = {"context_overflow": True}
    world.settings = {"receipt_path": "/tasks/{task_id}/receipt"}
    world.receipts = [receipt]
    (end,) = await world.run()
    assert end.outcome is outcome


@pytest.mark.parametrize(
    ("status", "interactions", "suspected"),
    [("HARNESS_FAILED", 0, True), ("HARNESS_FAILED", 1, False), ("TIMEOUT", 0, False)],
)
async def test_a_harness_that_failed_without_reaching_the_model_makes_its_registration_suspect(
    world, answer, status, interactions, suspected
) -> None:
    world.results = [answer(status)]
    world.closed = {"num_interactions": interactions}
    (end,) = await world.run()
    assert ("suspect stream-areal-x" in world.events) is suspected
    assert (end.outcome is EpisodeClass.UNKNOWN) == (interactions == 0 or status == "HARNESS_FAILED")


async def test_without_a_configured_path_no_receipt_is_asked_for(world, answer) -> None:
    world.results = [answer("HARNESS_FAILED")]
    world.receipts = [AssertionError("asked")]
    (end,) = await world.run()
    assert end.outcome is EpisodeClass.UNKNOWN


async def test_an_arena_that_is_away_while_a_task_runs_is_waited_for(world, answer) -> None:
    world.results = [ArenaConnectionError("away"), ArenaBusyError("busy", status=503), answer("DONE", 1.0)]
    (end,) = await world.run()
    assert (end.score, len(world.launches)) == (1.0, 1)


async def test_a_task_without_a_terminal_result_ends_at_its_own_deadline(world, answer) -> None:
    world.results = [answer("PENDING")]
    world.settings = {"task_timeout_s": 0.05}
    world.ports = {"pause": pause}
    end, again = await world.run()
    assert (end.status, end.outcome, end.session) == ("LOCAL_WAIT_TIMEOUT", EpisodeClass.SYSTEM, S0)
    assert "0.05 s" in end.error
    assert again.attempt == 1
    assert world.events[-2] == f"close {S0}"


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ArenaNotFoundError("gone", status=404), "NOT_FOUND"),
        (TaskResultError("no score"), "CONTRACT"),
        (ArenaRefusedError("what?", status=400), "LOCAL_POLL_REFUSED"),
        (ArenaAuthError("who?", status=403), "LOCAL_POLL_REFUSED"),
    ],
)
async def test_a_task_whose_result_can_not_be_had_is_a_system_failure_and_tried_again(world, error, status) -> None:
    world.results = [error]
    end, again = await world.run()
    assert (end.outcome, end.status, end.final, again.attempt) == (EpisodeClass.SYSTEM, status, False, 1)
    assert world.events[-2:] == [f"close {S0}", "leave"]


@pytest.mark.parametrize("status", [401, 403])
async def test_a_poll_that_is_refused_for_our_credentials_is_asked_again_since_the_task_goes_on(
    world, answer, status
) -> None:
    refused = ArenaAuthError("who?", status=status)
    world.results = [refused, refused, refused, answer("AGENT_RUNNING"), refused, answer("DONE", 1.0)]
    (end,) = await world.run()
    assert (end.outcome, end.score, len(world.launches)) == (EpisodeClass.SCORED, 1.0, 1)
    assert world.pauses[1:4] == pytest.approx([1, 2, 4], abs=0.5)
    assert world.pauses[5] == pytest.approx(1, abs=0.5)


async def test_a_registration_that_is_refused_is_a_system_failure_that_closes_its_session(world) -> None:
    world.refused_reach = ArenaRefusedError("no such protocol", status=400)
    end, again = await world.run()
    assert (end.outcome, end.status, end.final) == (EpisodeClass.SYSTEM, "LOCAL_LAUNCH_REFUSED", False)
    assert (end.session, again.attempt) == (S0, 1)
    assert world.events == [f"open {S0} 0", f"reach {S0}", f"close {S0}"]


@pytest.mark.parametrize(("own", "harness"), [("", "default-loop@4"), ("own-loop@2", "own-loop@2")])
async def test_an_end_names_the_harness_and_the_reward_of_its_launch_after_a_take_over_too(
    world, answer, own, harness
) -> None:
    class Live:
        async def check(self, _stream) -> ArenaStream:
            default = VersionedRef(key="default-loop", version="4")
            return ArenaStream(
                stream_id="arena-s", status="ACTIVE", harness=default, reward=VersionedRef(key="sum", version="2")
            )

    world.streams = {"s": StreamConfig(name="s", stream_id="arena-s", harness=own)}
    world.ports = {"reward": Live()}
    world.results = [world.killed()]
    with pytest.raises(RetryableError):
        await world.run()
    launched = world.recorded[0].launched
    assert (launched.harness, launched.reward_key) == (harness, "sum@2")
    world.ports = {}
    world.results = [answer("DONE", 1.0)]
    (end,) = await world.run()
    assert (end.harness, end.reward_key) == (harness, "sum@2")


async def test_a_stream_that_can_not_be_looked_at_is_a_system_failure_within_the_budget(world) -> None:
    class Refused:
        async def check(self, _stream) -> None:
            raise ArenaAuthError("who?", status=401)

    world.ports = {"reward": Refused()}
    end, again = await world.run()
    assert (end.outcome, end.status, end.final, again.attempt) == (
        EpisodeClass.SYSTEM,
        "LOCAL_LAUNCH_REFUSED",
        False,
        1,
    )
    (end,) = await world.run(world.requested(attempt=2))
    assert end.final
    assert world.launches == []


async def test_a_surplus_episode_of_a_closed_group_is_cancelled_here_and_never_awaited(world, answer) -> None:
    groups = ClosedGroups()
    world.results = [answer("AGENT_RUNNING")]
    world.settings = {"poll_interval_s": 3600}
    world.ports = {"pause": pause, "groups": groups}
    ends: list = []

    async def episode() -> None:
        ends.extend(await world.run())

    with anyio.fail_after(5):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(episode)
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


async def test_drift_of_the_reward_stops_the_launch(world) -> None:
    class Drifted:
        async def check(self, _stream) -> None:
            raise RewardDriftError("expected reward r@1, the live stream has r@2")

    world.ports = {"reward": Drifted()}
    (end,) = await world.run()
    assert (end.status, end.outcome, end.final, world.launches) == (
        "LOCAL_LAUNCH_REFUSED",
        EpisodeClass.SYSTEM,
        True,
        [],
    )
    assert "r@2" in end.error


async def test_a_stream_that_the_config_does_not_know_is_refused(world) -> None:
    with pytest.raises(RefusedError, match="'other'"):
        await world.run(world.requested(stream="other"))


async def test_a_raw_object_above_the_limit_is_left_out_but_its_size_told(world, answer) -> None:
    world.results = [answer("DONE", 1.0, raw="x" * 1000)]
    world.settings = {"max_raw_bytes": 100}
    (end,) = await world.run()
    assert (end.raw_json, end.raw_size_bytes) == (b"", 1002)


def test_a_request_that_was_given_up_still_ends_its_slot(world) -> None:
    (end,) = gave_up(world.requested(attempt=1), "attempts")
    assert (end.final, end.status, end.outcome, end.attempt) == (True, "LOCAL_GAVE_UP", EpisodeClass.SYSTEM, 1)
    msgspec.msgpack.encode(end)


def test_the_first_look_at_an_unknown_streams_task_comes_soon_and_waits_grow_to_the_interval() -> None:
    pace = Pace(5.0)
    waits = [pace.wait_s("s", age, 0.5) for age in (0, 0.1, 1, 4, 10, 1000)]
    assert waits == pytest.approx([0.1, 0.1, 0.5, 2, 5, 5])


def test_a_stream_of_long_tasks_is_first_looked_at_shortly_before_its_quickest_would_end() -> None:
    pace = Pace(5.0)
    for seconds in (60, 80, 70):
        pace.ended("slow", seconds)
    assert pace.wait_s("slow", 0, 0.5) == pytest.approx(54)
    assert pace.wait_s("slow", 54, 0.5) == pytest.approx(5)
    assert pace.wait_s("other", 0, 0.5) == pytest.approx(0.1)


def test_a_task_that_fails_at_once_is_seen_within_a_minute_however_long_its_siblings_took() -> None:
    pace = Pace(5.0)
    pace.ended("hours", 7200)
    assert pace.wait_s("hours", 0, 0.5) == pytest.approx(60)


def test_all_looks_of_a_process_together_stay_below_a_rate() -> None:
    pace = Pace(5.0, max_looks_per_s=100)
    with contextlib.ExitStack() as stack:
        for _ in range(2000):
            stack.enter_context(pace.watching())
        assert pace.wait_s("s", 0, 0.5) == pytest.approx(20)
        assert pace.wait_s("s", 1000, 0.5) == pytest.approx(20)
    assert pace.wait_s("s", 0, 0.5) == pytest.approx(0.1)


def test_looks_are_spread_over_a_quarter_of_their_wait() -> None:
    pace = Pace(5.0)
    waits = [pace.wait_s("s", 100, unit / 10) for unit in range(10)]
    assert min(waits) == pytest.approx(4.375)
    assert max(waits) < 5.625
    assert len(set(waits)) == 10


def test_lateness_is_told_at_its_99th_percentile() -> None:
    pace = Pace(5.0)
    assert pace.lateness_p99_s() == 0
    for late in range(100):
        pace.looked(late / 100)
    assert pace.lateness_p99_s() == pytest.approx(0.99)


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
    ends: list = []

    async def episode() -> None:
        ends.extend(await world.run(world.requested(min_version=5)))

    with anyio.fail_after(5):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(episode)
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
    ends: list = []

    async def episode() -> None:
        ends.extend(await world.run(world.requested(min_version=5)))

    with anyio.fail_after(5):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(episode)
            while not world.asked_versions:
                await anyio.lowlevel.checkpoint()
            groups.close("g0000001")
    (end,) = ends
    assert (end.status, end.final, world.launches, world.events) == ("LOCAL_WAIT_CANCELLED", True, [], [])


@contextlib.asynccontextmanager
async def playing(world, ends: list):
    """An episode that is under way."""

    async def episode() -> None:
        ends.extend(await world.run())

    with anyio.fail_after(10):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(episode)
            yield


async def looked_at(world, num_looks: int) -> None:
    while world.num_looks < num_looks:
        await anyio.lowlevel.checkpoint()


async def test_an_arena_that_is_away_is_waited_for_with_its_name_and_takes_no_delivery(world, answer) -> None:
    world.away = ArenaConnectionError("GET /streams: connection refused")
    world.launch_answers = [ArenaLaunchLostError("connection refused"), answer("PENDING")]
    ends: list = []
    async with playing(world, ends):
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
    ends: list = []
    async with playing(world, ends):
        await looked_at(world, 2)
        world.away = world.refused_reach = None
    (end,) = ends
    assert (end.outcome, end.session) == (EpisodeClass.SCORED, S0)
    assert "extra_launches" not in world.metrics.gauges


async def test_a_registration_that_fails_while_the_arena_answers_is_tried_again_here(world) -> None:
    world.refused_reach = ArenaBusyError("no upstream", status=503)
    ends: list = []
    async with playing(world, ends):
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
    ends: list = []
    async with playing(world, ends):
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
    ends: list = []
    async with playing(world, ends):
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
