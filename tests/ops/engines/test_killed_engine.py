"""An engine killed with requests in flight: they all end on another one, and what was sampled before keeps its version."""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import aiohttp
import anyio
import anyio.abc
import numpy as np
import pytest
from waiting import wait_until

from ops.engines.server_process import free_port
from schemas.config import EngineKind
from schemas.messages.engines import EngineAnnouncement, EngineState
from stages.clients.engines import HttpEngineSettings, http_engine
from stages.gateway.generation import Sampled, sample
from stages.gateway.settings import GatewayLimits
from stages.ports import EngineUnavailableError, GenerateRequest, SamplingSettings
from stages.routing.router import Router
from stages.routing.settings import RoutingSettings

NUM_REQUESTS = 32
NUM_TOKENS = 12
VOCAB_SIZE = 264


class Started:
    def __init__(self, process: anyio.abc.Process, url: str) -> None:
        self.process = process
        self.url = url


@asynccontextmanager
async def fake_server(kind: EngineKind, version: int, *, tokens: int = -1) -> AsyncGenerator[Started]:
    """A fake server process that serves a version."""
    port = free_port("127.0.0.1")
    script = Path(__file__).with_name("fake_server_process.py")
    command = [sys.executable, str(script), "--kind", kind.value, "--port", str(port), "--model", "/policy"]
    process = await anyio.open_process([*command, "--tokens", str(tokens), "--parent", str(os.getpid())])
    url = f"http://127.0.0.1:{port}"
    try:

        async def is_up() -> bool:
            try:
                await put_in(kind, url, version)
            except aiohttp.ClientError:
                return False
            return True

        await wait_until(is_up, url, deadline_s=60)
        yield Started(process, url)
    finally:
        if process.returncode is None:
            process.kill()
        await process.aclose()


async def put_in(kind: EngineKind, url: str, version: int) -> None:
    paths = {
        EngineKind.VLLM: ("/update_weight_version", {"new_version": str(version)}),
        EngineKind.SGLANG: ("/update_weights_from_disk", {"model_path": "/policy", "weight_version": str(version)}),
    }
    path, body = paths[kind]
    async with aiohttp.ClientSession() as http, http.post(url + path, json=body) as response:
        assert response.status == 200


def announced(name: str, kind: EngineKind, version: int) -> EngineAnnouncement:
    return EngineAnnouncement(
        name=name, kind=kind.value, state=EngineState.SERVING, version=version, capacity=NUM_REQUESTS, incarnation="1"
    )


@pytest.mark.parametrize("kind", [EngineKind.VLLM, EngineKind.SGLANG])
async def test_all_requests_of_a_killed_engine_end_elsewhere_and_their_tokens_keep_their_version(
    kind: EngineKind, wait_until
) -> None:
    settings = HttpEngineSettings(vocab_size=VOCAB_SIZE, max_context=256)
    router = Router(RoutingSettings())
    answers: dict[int, Sampled] = {}
    begun: set[int] = set()

    async def ask(number: int) -> None:
        async def on_ids(_ids: object) -> None:
            begun.add(number)

        request = GenerateRequest(
            request_id=f"r{number}",
            prompt_ids=np.array([number, number + 1], dtype=np.int32),
            settings=SamplingSettings(max_new_tokens=NUM_TOKENS),
            session=f"s{number}",
        )
        limits = GatewayLimits(resume_delay_s=0.01)
        answers[number] = await sample(router, request, limits=limits, context_length=256, on_ids=on_ids)

    async with AsyncExitStack() as stack, anyio.create_task_group() as tasks:
        dying = await stack.enter_async_context(fake_server(kind, 3, tokens=4))
        living = await stack.enter_async_context(fake_server(kind, 4))
        tasks.start_soon(router.run)
        first = await stack.enter_async_context(http_engine(kind, "a", dying.url, settings))
        router.join(first, announced("a", kind, 3))
        async with anyio.create_task_group() as asking:
            for number in range(NUM_REQUESTS):
                asking.start_soon(ask, number)
            await wait_until(lambda: len(begun) == NUM_REQUESTS)
            assert router.members[0].in_flight == NUM_REQUESTS
            second = await stack.enter_async_context(http_engine(kind, "b", living.url, settings))
            router.join(second, announced("b", kind, 4))
            dying.process.kill()
        assert router.num_failures == NUM_REQUESTS
        quarantine = router.members[0].quarantine
        assert quarantine is not None
        assert "a at http://127.0.0.1" in quarantine.reason
        tasks.cancel_scope.cancel()
    for number in range(NUM_REQUESTS):
        answer = answers[number]
        assert answer.ids().tolist() == list(range(number + 2, number + 2 + NUM_TOKENS))
        versions = [version for version, length in answer.versions for _ in range(length)]
        before = versions.count(3)
        assert before >= 1
        assert versions == [3] * before + [4] * (NUM_TOKENS - before)
        assert answer.logprobs().size == NUM_TOKENS
        assert not answer.fault


async def test_a_request_is_not_resumed_on_an_engine_that_is_too_old(wait_until) -> None:
    router = Router(RoutingSettings(wait_deadline_s=0.2, first_quarantine_s=30.0))
    settings = HttpEngineSettings(vocab_size=VOCAB_SIZE, max_context=256)
    kind = EngineKind.VLLM
    async with AsyncExitStack() as stack:
        dying = await stack.enter_async_context(fake_server(kind, 4, tokens=2))
        old = await stack.enter_async_context(fake_server(kind, 3))
        router.join(await stack.enter_async_context(http_engine(kind, "b", old.url, settings)), announced("b", kind, 3))
        new = await stack.enter_async_context(http_engine(kind, "a", dying.url, settings))
        router.join(new, announced("a", kind, 4))
        request = GenerateRequest(
            request_id="r",
            prompt_ids=np.array([1], dtype=np.int32),
            settings=SamplingSettings(max_new_tokens=9),
            min_version=4,
        )
        chunks = router.generate(request)
        assert (await anext(chunks)).version == 4
        dying.process.kill()
        with pytest.raises(EngineUnavailableError):
            async for _ in chunks:
                pass
        choice = router._choose(request)
        assert "b serves version 3" in choice.reason
        assert "a quarantined" in choice.reason
