"""The launch stage: order of what it does, faults, take-over, and what an episode's end says."""

import msgspec
import pytest

from pipeline.errors import RefusedError, RetryableError
from schemas.config_arena import StreamConfig
from schemas.messages.rollout import EpisodeClass
from schemas.messages.sampling import EpisodeRequested
from stages.arena_launch.polling import pause
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
