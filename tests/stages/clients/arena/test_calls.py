"""Every row of the API table, client against the local Arena over real HTTP."""

import asyncio

import pytest

from ops.arena.config import CallFault, CallName, EpisodeFault, FaultPlan, StreamSpec
from pipeline.errors import RefusedError, RetryableError
from stages.clients.arena.client import ModelEndpoint
from stages.clients.arena.errors import (
    ArenaAuthError,
    ArenaBusyError,
    ArenaContractError,
    ArenaLaunchLostError,
    ArenaNotFoundError,
    ArenaRefusedError,
    DatasetPagingError,
    TaskResultError,
)
from stages.clients.arena.secret import Secret

NAME = "stream-areal-session-0123456789abcdef"
ENVELOPES = ["bare", "data", "nested"]


def _plan(*calls: CallFault, **rest: object) -> FaultPlan:
    return FaultPlan(calls=calls, **rest)


async def test_get_streams_lists_active_streams_with_their_harness_and_reward(start_arena, open_client) -> None:
    client = await open_client(await start_arena())
    (stream,) = await client.list_streams()
    assert (stream.stream_id, stream.status) == ("words", "ACTIVE")
    assert str(stream.harness) == "scripted@1"
    assert str(stream.reward) == "chain_sum@1"
    assert await client.list_streams(status="PAUSED") == []


@pytest.mark.parametrize("envelope", ENVELOPES)
async def test_get_stream_reads_every_envelope_and_checks_the_id(start_arena, open_client, envelope) -> None:
    client = await open_client(await start_arena(envelope=envelope))
    assert (await client.get_stream("words")).stream_id == "words"
    with pytest.raises(ArenaNotFoundError):
        await client.get_stream("no such/stream")


async def test_a_stream_that_is_not_active_is_an_error(start_arena, open_client) -> None:
    paused = StreamSpec(stream_id="p", dataset="chain_sum", harness="scripted@1", size=2, status="PAUSED")
    client = await open_client(await start_arena(streams=(paused,)))
    with pytest.raises(ArenaContractError, match="'PAUSED', expected 'ACTIVE'"):
        await client.get_stream("p")


async def test_ids_in_paths_are_percent_encoded(start_arena, open_client, launch_of) -> None:
    odd = StreamSpec(stream_id="räum 1?%", dataset="chain_sum", harness="scripted@1", size=3)
    client = await open_client(await start_arena(streams=(odd,)))
    assert (await client.get_stream("räum 1?%")).stream_id == "räum 1?%"
    assert len(await client.list_dataset("räum 1?%")) == 3


async def test_the_dataset_is_read_in_pages_of_at_most_a_thousand(start_arena, open_client) -> None:
    big = StreamSpec(stream_id="big", dataset="chain_sum", harness="scripted@1", size=2101, domain="letters")
    client = await open_client(await start_arena(streams=(big,)))
    rows = await client.list_dataset("big")
    assert len({row.data_id for row in rows}) == 2101
    assert {row.task_type for row in rows} == {"letters"}


async def test_a_total_that_changes_between_pages_is_an_error_naming_stream_and_values(
    start_arena, open_client
) -> None:
    fault = CallFault(call=CallName.DATASET, kind="changed_total", skip=1)
    client = await open_client(await start_arena(faults=_plan(fault)))
    with pytest.raises(DatasetPagingError, match=r"'words' dataset page 0: total is 41, it was 40"):
        await client.list_dataset("words")


@pytest.mark.parametrize("envelope", ["bare", "data"])
async def test_get_stream_tasks_reads_both_forms(start_arena, open_client, launch_of, finished, envelope) -> None:
    client = await open_client(await start_arena(envelope=envelope))
    rows = await client.list_dataset("words")
    launched = await client.launch(launch_of(client, rows[0].data_id))
    await finished(client, launched.task_id)
    (task,) = await client.list_tasks("words")
    assert task.status == "DONE"
    assert (str(task.harness), str(task.reward)) == ("scripted@1", "chain_sum@1")


@pytest.mark.parametrize("envelope", ENVELOPES)
async def test_get_harness_version_tells_its_status(start_arena, open_client, envelope) -> None:
    client = await open_client(await start_arena(envelope=envelope))
    assert await client.harness_status("scripted", "1") == "PUBLISHED"
    assert await client.harness_status("retired", "1") == "RETIRED"
    with pytest.raises(ArenaNotFoundError):
        await client.harness_status("scripted", "2")


@pytest.mark.parametrize("envelope", ENVELOPES)
async def test_a_model_is_registered_read_renewed_and_deleted(start_arena, open_client, endpoint, envelope) -> None:
    client = await open_client(await start_arena(envelope=envelope))
    assert await client.get_model(NAME) is None
    assert await client.renew_model(NAME) is False
    await client.register_model(NAME, endpoint, deployment_id="run-1")
    model = await client.get_model(NAME)
    assert model["metadata"] == {"deployment_id": "run-1"}
    assert "api_key" not in str(model)
    assert await client.renew_model(NAME) is True
    assert await client.delete_model(NAME) is True
    assert await client.delete_model(NAME) is False


async def test_a_registered_base_url_has_no_trailing_slash(start_arena, open_client, endpoint) -> None:
    client = await open_client(await start_arena())
    slashed = ModelEndpoint(endpoint_id="e", upstream_model="m", base_url="http://127.0.0.1:1/v1/", api_key=Secret("k"))
    await client.register_model(NAME, slashed, deployment_id="run-1")
    model = await client.get_model(NAME)
    assert model["endpoints"][0]["base_url"] == "http://127.0.0.1:1/v1"


async def test_a_model_name_outside_the_prefix_is_refused(start_arena, open_client, endpoint) -> None:
    client = await open_client(await start_arena())
    with pytest.raises(ArenaRefusedError, match="422"):
        await client.register_model("other-name", endpoint, deployment_id="d")


async def test_a_launch_is_accepted_as_pending_and_ends_with_a_score(
    start_arena, open_client, launch_of, finished
) -> None:
    client = await open_client(await start_arena())
    rows = await client.list_dataset("words")
    launched = await client.launch(launch_of(client, rows[0].data_id, session_id="s-1"))
    assert launched.status == "PENDING"
    result = await finished(client, launched.task_id)
    assert (result.status, result.score) == ("DONE", 1.0)
    assert result.artifacts_uri
    assert result.trace_id
    assert result.computed_at


async def test_a_launch_may_be_answered_by_a_terminal_result_at_once(start_arena, open_client, launch_of) -> None:
    faults = FaultPlan(episodes=(EpisodeFault(kind="immediate"),))
    client = await open_client(await start_arena(faults=faults, envelope="nested"))
    rows = await client.list_dataset("words")
    result = await client.launch(launch_of(client, rows[0].data_id))
    assert (result.terminal, result.score) == (True, 1.0)


async def test_a_harness_override_is_used_and_an_unpublished_one_refused(
    start_arena, open_client, launch_of, endpoint, upstream, finished
) -> None:
    client = await open_client(await start_arena())
    await client.register_model(NAME, endpoint, deployment_id="d")
    rows = await client.list_dataset("words")
    launched = await client.launch(launch_of(client, rows[0].data_id, harness="openai-loop@1"))
    assert (await finished(client, launched.task_id)).score == 1.0
    assert len(upstream.calls) == 1
    with pytest.raises(ArenaRefusedError, match="not published"):
        await client.launch(launch_of(client, rows[0].data_id, harness="retired@1"))


async def test_model_name_base_url_and_api_key_in_the_harness_are_ours_whatever_the_user_set(
    start_arena, open_client, launch_of, endpoint, upstream, finished
) -> None:
    client = await open_client(await start_arena())
    await client.register_model(NAME, endpoint, deployment_id="d")
    rows = await client.list_dataset("words")
    envs = {"MODEL_NAME": "theirs", "BASE_URL": "http://127.0.0.1:1", "API_KEY": "theirs"}
    launched = await client.launch(launch_of(client, rows[0].data_id, harness="openai-loop@1", envs=envs))
    assert (await finished(client, launched.task_id)).status == "DONE"
    assert upstream.calls[0]["model"] == "policy"


@pytest.mark.parametrize(
    ("harness", "calls"), [("openai-loop@1", 1), ("openai-two-turn@1", 2), ("claude-loop@1", 2), ("codex-loop@1", 2)]
)
async def test_each_protocol_reaches_the_registered_chat_endpoint_with_the_session_headers(
    start_arena, open_client, launch_of, endpoint, upstream, finished, harness, calls
) -> None:
    client = await open_client(await start_arena())
    await client.register_model(NAME, endpoint, deployment_id="d")
    rows = await client.list_dataset("words")
    headers = "X-Session-Id: s-1\nX-Session-Token: t-1"
    envs = {"OPENAI_CUSTOM_HEADERS": headers, "ANTHROPIC_CUSTOM_HEADERS": headers}
    launched = await client.launch(launch_of(client, rows[0].data_id, harness=harness, envs=envs))
    result = await finished(client, launched.task_id)
    assert (result.status, result.score) == ("DONE", 1.0)
    assert len(upstream.calls) == calls
    assert [message["role"] for message in upstream.calls[-1]["messages"]] == ["user", "assistant", "user"][
        : 2 * calls - 1
    ]
    assert {(h["x-session-id"], h["x-session-token"]) for h in upstream.headers} == {("s-1", "t-1")}


async def test_the_direct_route_calls_the_base_url_of_its_environment(
    start_arena, open_client, launch_of, upstream, finished
) -> None:
    client = await open_client(await start_arena())
    rows = await client.list_dataset("words")
    envs = {"OPENAI_BASE_URL": upstream.url, "OPENAI_API_KEY": "marked-upstream-key"}
    launched = await client.launch(launch_of(client, rows[0].data_id, harness="openai-loop@1", envs=envs))
    assert (await finished(client, launched.task_id)).score == 1.0
    assert len(upstream.calls) == 1


async def test_the_model_gateway_proves_its_key_by_one_tiny_generation(
    start_arena, open_client, endpoint, upstream
) -> None:
    url = await start_arena()
    client = await open_client(url)
    await client.register_model(NAME, endpoint, deployment_id="d")
    await client.generate_once(NAME)
    assert upstream.calls[0]["max_tokens"] == 1
    wrong = await open_client(url, llm_api_key=Secret("wrong"))
    with pytest.raises(ArenaAuthError):
        await wrong.generate_once(NAME)
    with pytest.raises(ArenaNotFoundError):
        await client.generate_once("stream-areal-nobody")


async def test_a_wrong_token_is_refused_at_once(start_arena, open_client) -> None:
    client = await open_client(await start_arena(), token=Secret("wrong"))
    with pytest.raises(ArenaAuthError):
        await client.list_streams()
    assert client.slept == []


async def test_a_request_is_sent_four_times_with_doubling_pauses(start_arena, open_client) -> None:
    fault = CallFault(call=CallName.STREAMS_GET, kind="status", status=503)
    client = await open_client(await start_arena(faults=_plan(fault)))
    with pytest.raises(ArenaBusyError) as caught:
        await client.get_stream("words")
    assert caught.value.status == 503
    assert client.slept == [1, 2, 4]


@pytest.mark.parametrize(
    "kind", [{"kind": "status", "status": 429}, {"kind": "status", "status": 500}, {"kind": "lost_answer"}]
)
async def test_429_5xx_and_lost_answers_are_survived_by_a_repetition(start_arena, open_client, kind) -> None:
    fault = CallFault(call=CallName.RESULT, limit=2, **kind)
    gets = CallFault(call=CallName.STREAMS_GET, limit=2, **kind)
    client = await open_client(await start_arena(faults=_plan(fault, gets)))
    assert (await client.get_stream("words")).stream_id == "words"
    assert client.slept == [1, 2][: len(client.slept)]  # the connection pool itself repeats a GET on a dead connection
    assert client.slept


async def test_retry_after_is_honoured(start_arena, open_client) -> None:
    fault = CallFault(call=CallName.STREAMS_LIST, kind="status", status=429, retry_after_s=17, limit=1)
    client = await open_client(await start_arena(faults=_plan(fault)))
    await client.list_streams()
    assert client.slept == [17]


async def test_a_launch_that_the_arena_puts_off_tells_for_how_long(start_arena, open_client, launch_of) -> None:
    fault = CallFault(call=CallName.LAUNCH, kind="status", status=429, retry_after_s=17)
    client = await open_client(await start_arena(faults=_plan(fault)))
    with pytest.raises(ArenaBusyError) as caught:
        await client.launch(launch_of(client, "d"))
    assert caught.value.retry_after == "17"


async def test_a_refused_connection_is_tried_again_and_ends_as_a_connection_error(open_client) -> None:
    client = await open_client("http://127.0.0.1:9")
    with pytest.raises(Exception, match="GET /openapi/v1/streams") as caught:
        await client.list_streams()
    assert type(caught.value).__name__ == "ArenaConnectionError"
    assert client.slept == [1, 2, 4]


async def test_a_request_without_an_answer_ends_at_its_deadline(start_arena, open_client) -> None:
    fault = CallFault(call=CallName.STREAMS_LIST, kind="delay", delay_s=30)
    client = await open_client(await start_arena(faults=_plan(fault)), request_timeout_s=0.05, request_retries=0)
    with pytest.raises(Exception, match=r"no answer within 0\.05 s"):
        await client.list_streams()


@pytest.mark.parametrize(("fault", "error"), [
    ({"kind": "lost_answer"}, ArenaLaunchLostError),
    ({"kind": "status", "status": 502}, ArenaLaunchLostError),
    ({"kind": "status", "status": 429}, ArenaBusyError),
])  # fmt: skip
async def test_the_launch_is_never_repeated_by_the_client(start_arena, open_client, launch_of, fault, error) -> None:
    client = await open_client(await start_arena(faults=_plan(CallFault(call=CallName.LAUNCH, **fault))))
    rows = await client.list_dataset("words")
    with pytest.raises(error):
        await client.launch(launch_of(client, rows[0].data_id))
    assert client.slept == []
    tasks = await client.list_tasks("words")
    assert len(tasks) == (1 if fault["kind"] == "lost_answer" else 0)


@pytest.mark.parametrize(
    "status",
    ["CANCELLED", "COLLECT_FAILED", "EVAL_FAILED", "FAILED", "HARNESS_FAILED", "NO_OUTPUT", "SETUP_FAILED", "TIMEOUT"],
)
async def test_each_failed_status_is_terminal_and_has_no_score_of_its_own(
    start_arena, open_client, launch_of, finished, status
) -> None:
    faults = FaultPlan(episodes=(EpisodeFault(kind="status", status=status),))
    client = await open_client(await start_arena(faults=faults))
    rows = await client.list_dataset("words")
    launched = await client.launch(launch_of(client, rows[0].data_id))
    result = await finished(client, launched.task_id)
    assert (result.status, result.score, result.terminal) == (status, None, True)


async def test_a_hung_boot_stays_pending(start_arena, open_client, launch_of) -> None:
    faults = FaultPlan(episodes=(EpisodeFault(kind="hung_boot"),))
    client = await open_client(await start_arena(faults=faults))
    rows = await client.list_dataset("words")
    launched = await client.launch(launch_of(client, rows[0].data_id))
    for _ in range(5):
        assert (await client.task_result(launched.task_id)).status == "PENDING"


async def test_collected_registrations_are_missing_afterwards(start_arena, open_client, launch_of, endpoint) -> None:
    client = await open_client(await start_arena(faults=FaultPlan(collect_after_launches=(1,))))
    await client.register_model(NAME, endpoint, deployment_id="d")
    rows = await client.list_dataset("words")
    await client.launch(launch_of(client, rows[0].data_id))
    assert await client.renew_model(NAME) is False


async def test_the_result_of_an_unknown_task_is_an_error(start_arena, open_client) -> None:
    client = await open_client(await start_arena())
    with pytest.raises(ArenaNotFoundError):
        await client.task_result("task-none")


async def test_a_receipt_is_read_at_the_configured_path(start_arena, open_client, launch_of, finished) -> None:
    receipt = '{"error": {"phase": "agent", "type": "max_turns"}}'
    fault = EpisodeFault(kind="status", status="HARNESS_FAILED", receipt_json=receipt, limit=1)
    client = await open_client(await start_arena(receipt_enabled=True, faults=FaultPlan(episodes=(fault,))))
    rows = await client.list_dataset("words")
    first = await client.launch(launch_of(client, rows[0].data_id))
    await finished(client, first.task_id)
    assert (await client.receipt("/tasks/{task_id}/receipt", first.task_id))["error"]["type"] == "max_turns"
    second = await client.launch(launch_of(client, rows[1].data_id))
    assert await client.receipt("/tasks/{task_id}/receipt", second.task_id) is None


@pytest.mark.parametrize("number", [20, pytest.param(200, marks=pytest.mark.nightly)])
async def test_many_episodes_run_at_once(start_arena, open_client, launch_of, endpoint, finished, number) -> None:
    client = await open_client(await start_arena())
    await client.register_model(NAME, endpoint, deployment_id="d")
    rows = await client.list_dataset("words")

    async def episode(i: int) -> float:
        launched = await client.launch(launch_of(client, rows[i % 40].data_id, harness="openai-two-turn@1"))
        return (await finished(client, launched.task_id)).score

    assert set(await asyncio.gather(*[episode(i) for i in range(number)])) == {1.0}


def test_the_error_types_say_whether_to_try_again() -> None:
    assert issubclass(ArenaLaunchLostError, RetryableError)
    assert issubclass(ArenaBusyError, RetryableError)
    assert issubclass(TaskResultError, RefusedError)
    assert issubclass(ArenaAuthError, RefusedError)
