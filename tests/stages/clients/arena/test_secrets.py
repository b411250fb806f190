"""A run with marked secrets: none of them in anything that is printed, raised, logged or written."""

import copy
import json
import logging
import pickle
import traceback

import msgspec
import pytest
import structlog
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from ops.arena.server import ArenaSecrets
from schemas.errors import ConfigError
from stages.clients.arena.client import Launch, ModelEndpoint
from stages.clients.arena.errors import ERROR_TEXT_LIMIT, ArenaError
from stages.clients.arena.registration import RegistrationSettings, open_registrations
from stages.clients.arena.secret import Secret, scrubbed, secret_from

MARKS = ("marked-openapi-token", "marked-llm-key", "marked-upstream-key", "marked-session-token", "marked-user-env")


def _assert_clean(text: str) -> None:
    assert [mark for mark in MARKS if mark in text] == []


def test_a_secret_can_not_be_printed_encoded_or_pickled() -> None:
    secret = Secret("marked-llm-key")
    for text in (
        repr(secret),
        str(secret),
        f"{secret}",
        f"{secret:>20}",
        f"{secret!r}",
        repr([secret]),
        repr({"k": secret}),
    ):
        _assert_clean(text)
    with pytest.raises(TypeError):
        msgspec.json.encode({"key": secret})
    with pytest.raises(TypeError):
        pickle.dumps(secret)
    with pytest.raises(TypeError):
        copy.deepcopy(secret)
    assert secret == Secret("marked-llm-key")
    assert secret.reveal() == "marked-llm-key"
    assert not Secret("")


def test_structs_that_hold_secrets_print_without_them() -> None:
    endpoint = ModelEndpoint(
        endpoint_id="e", upstream_model="m", base_url="http://x", api_key=Secret("marked-upstream-key")
    )
    launch = Launch(
        stream_id="s",
        data_id="d",
        model_name="m",
        base_url="http://x",
        api_key=Secret("marked-llm-key"),
        envs={"TOKEN": "marked-user-env"},
    )
    secrets = ArenaSecrets(openapi_token="marked-openapi-token", llm_api_key="marked-llm-key")
    for value in (endpoint, launch, secrets):
        _assert_clean(repr(value))
    assert "TOKEN" in repr(launch)


def test_a_missing_credential_is_named_by_its_variable() -> None:
    assert secret_from({"A": "marked-llm-key"}, "A").reveal() == "marked-llm-key"
    with pytest.raises(ConfigError, match="ARENA_OPENAPI_TOKEN"):
        secret_from({}, "ARENA_OPENAPI_TOKEN")


def test_longer_secrets_are_taken_out_before_the_shorter_ones_they_hold() -> None:
    assert scrubbed("abcd abc", [Secret("abc"), Secret("abcd"), Secret("")]) == "*** ***"


async def _echo(request: Request) -> PlainTextResponse:
    """An Arena that quotes in its refusal everything that it was sent."""
    body = (await request.body()).decode()
    headers = json.dumps(dict(request.headers))
    return PlainTextResponse(f"bad request {headers} {body} " + "x" * 2000, 400)


@pytest.fixture
async def echoing(open_client, serve_app):
    url = await serve_app(Starlette(routes=[Route("/{path:path}", _echo, methods=["GET", "POST", "PATCH", "DELETE"])]))
    return await open_client(url)


async def test_an_arena_that_echoes_our_secrets_puts_none_into_our_errors(echoing, caplog) -> None:
    caplog.set_level(logging.DEBUG)
    envs = {"TOKEN": "marked-user-env", "ANTHROPIC_CUSTOM_HEADERS": "X-Session-Token: marked-session-token"}
    launch = Launch(
        stream_id="s", data_id="d", model_name="m", base_url="http://x", api_key=echoing.access.llm_api_key, envs=envs
    )
    endpoint = ModelEndpoint(
        endpoint_id="e", upstream_model="m", base_url="http://x/v1", api_key=Secret("marked-upstream-key")
    )
    calls = [
        echoing.list_streams,
        lambda: echoing.launch(launch),
        lambda: echoing.register_model("stream-areal-x", endpoint, deployment_id="d"),
        lambda: echoing.generate_once("m", {"X-Session-Token": "marked-session-token"}),
    ]
    for call in calls:
        with pytest.raises(ArenaError) as caught:
            await call()
        text = "".join(traceback.format_exception(caught.value)) + repr(caught.value.__cause__)
        _assert_clean(text)
        assert len(str(caught.value).split(": ", 2)[2]) <= ERROR_TEXT_LIMIT
        assert "***" in str(caught.value)
    _assert_clean(caplog.text)


async def test_a_run_with_marked_secrets_leaves_none_in_logs_errors_or_answers(
    start_arena, open_client, endpoint, launch_of, finished, caplog
) -> None:
    caplog.set_level(logging.DEBUG)
    client = await open_client(await start_arena())
    written: list[str] = []
    with structlog.testing.capture_logs() as logs:
        async with (
            open_registrations(client, RegistrationSettings(run_label="run", cleanup_timeout_s=1)) as registrations,
            registrations.hold("stream-areal-session-0123456789abcdef", endpoint, shared=True),
        ):
            rows = await client.list_dataset("words")
            envs = {
                "OPENAI_CUSTOM_HEADERS": "X-Session-Id: s\nX-Session-Token: marked-session-token",
                "USER": "marked-user-env",
            }
            launched = await client.launch(launch_of(client, rows[0].data_id, harness="openai-two-turn@1", envs=envs))
            result = await finished(client, launched.task_id)
            model = await client.get_model("stream-areal-session-0123456789abcdef")
            tasks = await client.list_tasks("words")
            written += [repr(result), repr(model), repr(tasks), repr(client.access)]
    assert result.score == 1.0
    _assert_clean("".join([*written, json.dumps(logs, default=repr), caplog.text]))
