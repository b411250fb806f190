"""Reported faults of weight synchronisation that concern routing: who may answer, and with which weights."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager

import anyio
import anyio.lowlevel
import msgspec
import numpy as np

from broker.memory import MemoryBroker, MemoryServer
from ops.engines.directory import EngineDirectory
from pipeline.log import RunLog
from schemas.config import EngineKind
from schemas.messages.engines import EngineAnnouncement, EngineState, engine_subject
from schemas.messages.rollout import FinishReason
from schemas.messages.training import WeightsPublished
from schemas.payload import PayloadRef
from stages.gateway.generation import Sampled, sample
from stages.gateway.settings import GatewayLimits
from stages.ports import EngineHealth, EngineUnavailableError, GenerateRequest, SamplingSettings, TokenChunk
from stages.routing.router import Router
from stages.routing.settings import RoutingSettings


class Server:
    """Answers with its version, four tokens a request, until it is killed or told to fail."""

    def __init__(self, version: int) -> None:
        self.version = version
        self.killed = False
        self.failing = ""
        self.num_requests = 0

    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        self.num_requests += 1
        for number in range(request.settings.max_new_tokens):
            await anyio.lowlevel.checkpoint()
            if self.killed or self.failing:
                raise EngineUnavailableError(self.failing or "connection reset")
            yield TokenChunk(
                token_ids=np.array([number], dtype=np.int32),
                logprobs=np.zeros(1, dtype=np.float32),
                version=self.version,
                finish_reason=FinishReason.LENGTH if number == request.settings.max_new_tokens - 1 else None,
            )

    async def health(self) -> EngineHealth:
        return EngineHealth(
            ready=not (self.killed or self.failing),
            version=self.version,
            num_running=0,
            num_waiting=0,
            max_context=99,
            detail=self.failing,
        )


class Fleet:
    """Servers, what their workers say, and a gateway's router that hears it."""

    def __init__(self) -> None:
        self.broker = MemoryBroker(MemoryServer(), "demo")
        self.router = Router(RoutingSettings(first_quarantine_s=0.01, wait_deadline_s=10.0))
        self.servers: dict[str, Server] = {}
        """By URL."""
        self.directory = EngineDirectory(self.broker, self.router, self.connect)
        self.answers: list[Sampled] = []
        self.kept = 0

    @asynccontextmanager
    async def connect(self, kind: EngineKind, name: str, url: str) -> AsyncGenerator[Server]:
        yield self.servers[url]

    async def say(self, name: str, incarnation: str, state: EngineState, version: int, url: str, **more) -> None:
        told = EngineAnnouncement(
            name=name, kind="vllm", state=state, version=version, url=url, incarnation=incarnation, capacity=8, **more
        )
        await self.broker.announce(engine_subject("demo", name), msgspec.msgpack.encode(told))

    async def publish(self, version: int) -> None:
        ref = PayloadRef(store="inline", id="x", size_bytes=0, inline=b"")
        await RunLog(self.broker).publish(
            WeightsPublished(version=version, generation=1, digest=f"d{version}", manifest=ref)
        )

    async def traffic(self) -> None:
        """One call after the other, for ever."""
        while True:
            await self.call()

    async def call(self) -> Sampled:
        async def on_ids(_ids: object) -> None:
            return None

        self.kept += 1
        request = GenerateRequest(
            request_id=f"r{self.kept}",
            prompt_ids=np.arange(3, dtype=np.int32),
            settings=SamplingSettings(max_new_tokens=4),
            session=f"s{self.kept % 40}",
        )
        limits = GatewayLimits(resume_delay_s=0.001)
        answer = await sample(self.router, request, limits=limits, context_length=99, on_ids=on_ids)
        self.answers.append(answer)
        return answer

    def versions(self, after: int) -> set[int]:
        return {version for answer in self.answers[after:] for version, _ in answer.versions}


@asynccontextmanager
async def running(fleet: Fleet) -> AsyncGenerator[anyio.abc.TaskGroup]:
    async with anyio.create_task_group() as tasks:
        await tasks.start(fleet.directory.run)
        yield tasks
        tasks.cancel_scope.cancel()


# radixark/miles#1724


async def test_miles_1724_a_replacement_server_gets_nothing_before_it_has_the_current_weights(wait_until) -> None:
    fleet = Fleet()
    await fleet.publish(12)
    fleet.servers = {"http://a": Server(12), "http://b": Server(12), "http://b2": Server(0)}
    fresh = fleet.servers["http://b2"]
    async with running(fleet) as tasks:
        for name in "ab":
            await fleet.say(name, "1", EngineState.SERVING, 12, f"http://{name}")
        for _ in range(3):
            tasks.start_soon(fleet.traffic)
        await wait_until(lambda: all(fleet.servers[f"http://{name}"].num_requests > 3 for name in "ab"))
        killed = len(fleet.answers)
        fleet.servers["http://b"].killed = True
        await fleet.say("b", "1", EngineState.STARTING, 12, "", reason="the server ended with SIGKILL")
        await fleet.say("b", "2", EngineState.LOADING, 0, "http://b2")
        # Even a worker that takes its server for ready too early is not believed.
        await fleet.say("b", "2", EngineState.SERVING, 0, "http://b2")
        await wait_until(lambda: len(fleet.answers) > killed + 20)
        assert fresh.num_requests == 0
        assert "version 0 and the others serve 12" in fleet.router.members[1].not_admitted
        fresh.version = 12
        await fleet.say("b", "2", EngineState.SERVING, 12, "http://b2")
        await wait_until(lambda: fresh.num_requests > 3)
    assert fleet.versions(0) == {12}
    assert all(answer.num == 4 for answer in fleet.answers)  # those of dead B ended on A, each once


# vllm-project/vllm#57854


async def test_vllm_57854_a_server_whose_load_failed_halfway_answers_nothing_until_the_next_version_is_in(
    wait_until,
) -> None:
    fleet = Fleet()
    fleet.servers = {f"http://{name}": Server(8) for name in "abc"}
    async with running(fleet):
        for name in "abc":
            await fleet.say(name, "1", EngineState.SERVING, 8, f"http://{name}")
        await wait_until(lambda: sum(one.admitted for one in fleet.router.members) == 3)
        await fleet.publish(9)
        for name in "ac":
            fleet.servers[f"http://{name}"].version = 9
            await fleet.say(name, "1", EngineState.SERVING, 9, f"http://{name}")
        half = fleet.servers["http://b"]
        await fleet.say("b", "1", EngineState.QUARANTINED, 8, "http://b", reason="version 9: chunk 2 of 4 failed")
        await wait_until(lambda: fleet.router.members[1].announced.state is EngineState.QUARANTINED)
        before = half.num_requests
        for _ in range(12):
            await fleet.call()
        assert half.num_requests == before
        assert fleet.versions(0) == {9}
        assert "chunk 2 of 4" in fleet.router.members[1].kept_away(anyio.current_time(), 5.0)
        for name in "abc":
            fleet.servers[f"http://{name}"].version = 10
            await fleet.say(name, "1", EngineState.SERVING, 10, f"http://{name}")
        await wait_until(lambda: not fleet.router.members[1].kept_away(anyio.current_time(), 5.0))
        for _ in range(12):
            await fleet.call()
        assert half.num_requests > before
        assert fleet.versions(12) == {10}


async def test_engines_that_fall_silent_leave_and_come_back(wait_until) -> None:
    fleet = Fleet()
    fleet.servers = {"http://a": Server(0)}
    async with running(fleet):
        await fleet.say("a", "1", EngineState.SERVING, 0, "http://a")
        await wait_until(lambda: len(fleet.router.members) == 1)
        fleet.router.members[0].heard_s -= 60
        await wait_until(lambda: not fleet.router.members)
        await fleet.say("a", "1", EngineState.SERVING, 0, "http://a")
        await wait_until(lambda: len(fleet.router.members) == 1)
        assert (await fleet.call()).num == 4
