"""Preflight: what is asked, what it means, what it shows; no task is launched."""

import msgspec
import pytest

from ops.arena.config import HarnessKind, HarnessSpec, StreamSpec
from ops.workers.preflights import KIND, remove_left_preflights
from ops.workers.slots import leave_mark, left_marks
from schemas.config_arena import ArenaSettings, LlmProtocol, RewardRef, StreamConfig
from stages.clients.arena.client import ModelEndpoint
from stages.clients.arena.drift import RewardGuard
from stages.clients.arena.errors import RewardDriftError
from stages.clients.arena.preflight import (
    PreflightReport,
    Problem,
    StreamFacts,
    gather,
    judge,
    preflight,
    prove_model_gateway,
)
from stages.clients.arena.registration import RegistrationSettings, open_registrations, preflight_model_name
from stages.clients.arena.secret import Secret
from stages.clients.arena.wire import ArenaStream, StreamTask, VersionedRef

HARNESS, REWARD = VersionedRef(key="h", version="1"), VersionedRef(key="r", version="1")
LIVE = ArenaStream(stream_id="s", status="ACTIVE", harness=HARNESS, reward=REWARD)
STREAM = StreamConfig(name="mine", stream_id="s", task_envs={"B_KEY": "marked-value", "A_KEY": "x"})


def _tasks(*statuses: str, harness=HARNESS, reward=REWARD) -> tuple[StreamTask, ...]:
    return tuple(StreamTask(status=status, harness=harness, reward=reward) for status in statuses)


def _facts(**changes) -> StreamFacts:
    return StreamFacts(
        **{"stream": LIVE, "harness_status": "PUBLISHED", "num_rows": 5, "tasks": _tasks("DONE"), **changes}
    )


def _checks(facts: StreamFacts, stream: StreamConfig = STREAM, **settings) -> list[str]:
    return [problem.check for problem in judge(stream, facts, ArenaSettings(**settings)).problems]


def test_a_healthy_stream_has_no_problem() -> None:
    report = judge(STREAM, _facts(), ArenaSettings())
    assert report.problems == ()
    assert (report.harness, report.reward, report.num_rows, report.terminal_tasks) == ("h@1", "r@1", 5, 1)


def test_names_of_envs_are_shown_and_never_their_values() -> None:
    report = judge(STREAM, _facts(), ArenaSettings())
    assert report.env_names == ("A_KEY", "B_KEY")
    assert b"marked-value" not in msgspec.json.encode(report)


def test_each_thing_that_is_wrong_is_a_problem_of_its_own() -> None:
    assert _checks(_facts(stream=None, harness_status=None, num_rows=None, tasks=None, errors=("down", "down"))) == [
        "stream",
        "stream",
    ]
    assert _checks(_facts(harness_status="RETIRED")) == ["harness"]
    assert _checks(_facts(num_rows=0)) == ["dataset"]
    pinned = msgspec.structs.replace(STREAM, expected_reward_ref=RewardRef(key="r", version="2"))
    assert _checks(_facts(), pinned) == ["reward"]
    assert "harness" in _checks(_facts(stream=msgspec.structs.replace(LIVE, harness=None)))


@pytest.mark.parametrize(("statuses", "settings", "unhealthy"), [
    ([], {}, True),
    ([], {"min_terminal_tasks": 0}, False),
    (["PENDING", "AGENT_RUNNING"], {}, True),
    (["DONE"], {"min_terminal_tasks": 2}, True),
    (["FAILED"] * 4 + ["DONE"], {}, True),
    (["FAILED"] * 79 + ["DONE"] * 21, {}, False),
    (["FAILED"] * 3 + ["OK"] * 2, {"max_failure_rate": 0.5}, True),
])  # fmt: skip
def test_health_counts_ended_tasks_and_their_failure_rate(statuses, settings, unhealthy) -> None:
    assert (_checks(_facts(tasks=_tasks(*statuses)), **settings) == ["health"]) is unhealthy


def test_health_counts_only_tasks_with_exactly_this_harness_and_reward() -> None:
    other = VersionedRef(key="h", version="2")
    tasks = _tasks("FAILED", "FAILED", harness=other) + _tasks("FAILED", reward=other) + _tasks("DONE")
    report = judge(STREAM, _facts(tasks=tasks), ArenaSettings())
    assert (report.terminal_tasks, report.failed_tasks, report.problems) == (1, 0, ())


def test_the_protocol_follows_the_harness_that_will_run() -> None:
    claude = msgspec.structs.replace(LIVE, harness=VersionedRef(key="claude-code", version="2"))
    assert judge(STREAM, _facts(stream=claude), ArenaSettings()).protocol == "anthropic"
    fixed = msgspec.structs.replace(STREAM, llm_protocol=LlmProtocol.RESPONSES)
    assert judge(fixed, _facts(stream=claude), ArenaSettings()).protocol == "responses"


def test_allow_unhealthy_waives_health_and_nothing_else() -> None:
    def exit_code(check: str, *, waivable: bool, allow: bool) -> int:
        report = judge(STREAM, _facts(), ArenaSettings())
        problem = Problem(check=check, text="x", waivable=waivable)
        bad = msgspec.structs.replace(report, problems=(problem,))
        return PreflightReport(streams=(bad,), problems=(), allow_unhealthy=allow).exit_code

    assert exit_code("health", waivable=True, allow=True) == 0
    assert exit_code("health", waivable=True, allow=False) == 1
    assert exit_code("harness", waivable=False, allow=True) == 1


async def test_preflight_over_http_finds_what_is_wrong_and_launches_nothing(
    start_arena, open_client, endpoint, upstream
) -> None:
    harnesses = (
        HarnessSpec(key="h", kind=HarnessKind.SCRIPTED),
        HarnessSpec(key="old", kind=HarnessKind.SCRIPTED, status="RETIRED"),
    )
    specs = tuple(StreamSpec(stream_id=name, dataset="chain_sum", size=3, harness="h@1") for name in ("a", "b"))
    client = await open_client(await start_arena(streams=specs, harnesses=harnesses))
    streams = [
        StreamConfig(name="a", stream_id="a"),
        StreamConfig(
            name="b", stream_id="b", harness="old@1", expected_reward_ref=RewardRef(key="chain_sum", version="9")
        ),
        StreamConfig(name="c", stream_id="gone"),
    ]
    async with open_registrations(client, RegistrationSettings(run_label="l")) as registrations:
        report = await preflight(
            client, streams, ArenaSettings(), registrations=registrations, endpoint=endpoint, allow_unhealthy=True
        )
    assert [sorted({p.check for p in stream.problems}) for stream in report.streams] == [
        ["health"],
        ["harness", "health", "reward"],
        ["stream"],
    ]
    assert (report.problems, report.exit_code) == ((), 1)
    assert len(upstream.calls) == 1
    assert await client.list_tasks("a") == []
    assert registrations.names == []


async def test_preflight_proves_the_model_gateways_key(start_arena, open_client, endpoint) -> None:
    url = await start_arena()
    client = await open_client(url, llm_api_key=Secret("wrong-marked-key"))
    async with open_registrations(client, RegistrationSettings(run_label="l")) as registrations:
        report = await preflight(
            client, [], ArenaSettings(), registrations=registrations, endpoint=endpoint, allow_unhealthy=False
        )
    (problem,) = report.problems
    assert problem.check == "model_gateway"
    assert "401" in problem.text
    assert "wrong-marked-key" not in problem.text


async def test_preflights_at_once_have_registrations_of_their_own_and_a_killed_ones_is_removed(
    start_arena, open_client, endpoint, tmp_path
) -> None:
    client = await open_client(await start_arena())
    label = RegistrationSettings(run_label="headrace-run")
    async with open_registrations(client, label) as first, open_registrations(client, label) as second:
        with leave_mark(tmp_path, KIND) as killed, leave_mark(tmp_path, KIND) as living:
            names = [preflight_model_name("headrace-run", mark.part) for mark in (killed, living)]
            problems = [
                await prove_model_gateway(registrations, client, endpoint, part=mark.part)
                for registrations, mark in ((first, killed), (second, living))
            ]
            assert problems == [None, None]
            async with first.hold(names[0], endpoint, shared=False):
                assert await prove_model_gateway(second, client, endpoint, part=living.part) is None
                assert await client.get_model(names[0]) is not None
        living.forget()
        await client.register_model(names[0], endpoint, deployment_id="headrace-run")
        with leave_mark(tmp_path, KIND) as third:
            kept = preflight_model_name("headrace-run", third.part)
            await client.register_model(kept, endpoint, deployment_id="headrace-run")
            await remove_left_preflights(second, tmp_path)
            assert await client.get_model(names[0]) is None
            assert await client.get_model(kept) is not None
    assert left_marks(tmp_path, KIND) == [third]


async def test_preflight_tells_an_unreachable_policy_from_a_wrong_key(start_arena, open_client) -> None:
    client = await open_client(await start_arena(), request_retries=0)
    nowhere = ModelEndpoint(endpoint_id="e", upstream_model="m", base_url="http://127.0.0.1:9/v1", api_key=Secret("k"))
    async with open_registrations(client, RegistrationSettings(run_label="l")) as registrations:
        report = await preflight(
            client, [], ArenaSettings(), registrations=registrations, endpoint=nowhere, allow_unhealthy=False
        )
    assert "502" in report.problems[0].text


async def test_gathering_goes_on_after_an_error(start_arena, open_client) -> None:
    paused = StreamSpec(stream_id="p", dataset="chain_sum", harness="scripted@1", size=2, status="PAUSED")
    client = await open_client(await start_arena(streams=(paused,)))
    facts = await gather(client, StreamConfig(name="p", stream_id="p"))
    assert len(facts.errors) == 1
    assert (facts.num_rows, facts.tasks) == (2, ())


async def test_drift_of_the_reward_stops_the_launch_with_an_error(start_arena, open_client) -> None:
    client = await open_client(await start_arena())
    now = [0.0]
    guard = RewardGuard(client, clock=lambda: now[0])
    right = StreamConfig(name="w", stream_id="words", expected_reward_ref=RewardRef(key="chain_sum", version="1"))
    await guard.check(right)
    await guard.check(StreamConfig(name="w", stream_id="words"))
    wrong = msgspec.structs.replace(right, expected_reward_ref=RewardRef(key="chain_sum", version="2"))
    with pytest.raises(RewardDriftError, match=r"the live stream has chain_sum@1"):
        await guard.check(wrong)


async def test_the_live_reward_is_asked_for_again_after_a_while(start_arena, open_client) -> None:
    client = await open_client(await start_arena())
    asked = []
    real = client.get_stream

    async def counted(stream_id: str):
        asked.append(stream_id)
        return await real(stream_id)

    client.get_stream = counted
    now = [0.0]
    guard = RewardGuard(client, max_age_s=60, clock=lambda: now[0])
    pinned = StreamConfig(name="w", stream_id="words", expected_reward_ref=RewardRef(key="chain_sum", version="1"))
    for seconds in (0, 59, 61, 70):
        now[0] = seconds
        await guard.check(pinned)
    assert len(asked) == 2
