"""Preprocessors by the run's config, in the gateway's own worker."""

from contextlib import asynccontextmanager

import anyio
import httpx
import msgspec
import pytest

from broker.memory import MemoryBroker, MemoryServer
from ops.config import decode_config
from ops.gateway_peers import URL_LABEL
from ops.rollout_adapters import LogRecorder
from ops.run_folder import Endpoints, RunFolder
from ops.session_calls import RemoteSessions
from ops.workers.context import WorkerContext
from ops.workers.gateway import run_gateway
from schemas.errors import ConfigError
from schemas.messages.rollout import InteractionTokens
from stages.gateway.preprocessing import load_preprocessors
from stages.policy.byte_level import write_tokenizer_files
from stages.policy.tokenizer import load_tokenizer


@asynccontextmanager
async def worker(tmp_path, wait_until, *preprocessors):
    """A gateway's worker of a run on an in-memory broker: its context and where it serves."""
    write_tokenizer_files(tmp_path / "policy", max_context=1024)
    config = decode_config(
        {
            "run": {"id": "r"},
            "streams": [{"name": "words", "stream_id": "words", "sampling_weight": 1.0}],
            "arena": {"url": "local"},
            "rollout": {"max_new_tokens": 8, "max_context_tokens": 1024},
            "policy": {"folder": str(tmp_path / "policy")},
            "engine": {"kind": "scripted", "script": "stages.engine.scripts:random_letters"},
            "gateway": {"preprocessors": list(preprocessors)},
        }
    )
    context = WorkerContext(RunFolder(tmp_path), config, Endpoints(run="r"), MemoryBroker(MemoryServer(), "r"))

    def url():
        return next((found for one in context.reports() if (found := one.labels.get(URL_LABEL))), "")

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run_gateway, context)
        await wait_until(url)
        yield context, url()
        context.drain()


async def test_a_preprocessor_of_the_config_is_applied_once_to_every_call(tmp_path, wait_until):
    async with worker(tmp_path, wait_until, "marking:mark") as (context, url):
        recorder = LogRecorder(context.log)
        ticket = await RemoteSessions(context.broker, recorder).open("s", min_version=0)
        key = {"authorization": f"Bearer {ticket.token.reveal()}"}
        async with httpx.AsyncClient(base_url=f"{url}/v1", headers=key) as http:
            messages = [{"role": "user", "content": "hi"}]
            answer = await http.post("/chat/completions", json={"messages": messages})
            messages += [answer.json()["choices"][0]["message"], {"role": "user", "content": "more"}]
            await http.post("/chat/completions", json={"messages": messages, "stream": True})
            await http.post("/messages", json={"messages": messages[:1], "max_tokens": 4})
            response = await http.post("/responses", json={"input": "hi"})
            chained = {"input": "more", "previous_response_id": response.json()["id"]}
            assert (await http.post("/responses", json=chained)).status_code == 200
        recorded = await recorder.read_session("s")
        tokenizer = load_tokenizer(tmp_path / "policy")
        prompts = []
        for one in recorded:
            tokens = msgspec.msgpack.decode(await context.payloads.get(one.tokens), type=InteractionTokens)
            prompts.append(tokenizer.decode(tokens.prompt_ids.as_numpy()))
    assert [one.parent for one in recorded] == [None, 0, None, None, 3]
    # A call that extends another adds what is new; its mark stands in what it extends.
    assert [prompt.count("[mark]") for prompt in prompts] == [1, 0, 1, 1, 0]


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("nowhere:mark", "can't import 'nowhere:mark'"),
        ("marking:nothing", "can't import 'marking:nothing'"),
        ("marking", "expected package.module:function"),
        ("", "expected package.module:function"),
        ("marking:NUMBER", "is a int, expected a plain function"),
        ("marking:later", "is an async function, expected a plain function"),
        ("marking:of_two", "can't be called with one Call"),
    ],
)
def test_what_is_no_preprocessor_is_refused_by_name(path, reason):
    with pytest.raises(ConfigError, match=r"^gateway\.preprocessors: ") as refused:
        load_preprocessors([path])
    assert reason in str(refused.value)


async def test_a_worker_does_not_start_without_its_preprocessors(tmp_path, wait_until):
    with pytest.raises(ExceptionGroup) as raised:
        async with worker(tmp_path, wait_until, "nowhere:mark"):
            pass
    assert raised.group_contains(ConfigError, match="can't import 'nowhere:mark'")


async def test_a_preprocessor_that_returns_no_call_is_a_fault_that_marks_the_session(tmp_path, wait_until):
    async with worker(tmp_path, wait_until, "marking:forget") as (context, url):
        sessions = RemoteSessions(context.broker, LogRecorder(context.log))
        ticket = await sessions.open("s", min_version=0)
        async with httpx.AsyncClient(base_url=url, headers={"x-session-token": ticket.token.reveal()}) as http:
            refused = await http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "hi"}]})
        closed = await sessions.close("s")
    assert (refused.status_code, "fault of the gateway" in closed.system_error) == (500, True)
