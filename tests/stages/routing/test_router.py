"""The router over engines that play scripts."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager

import anyio
import msgspec
import numpy as np
import pytest

from schemas.messages.engines import EngineAnnouncement, EngineState
from schemas.messages.rollout import FinishReason
from stages.engine.scripted import ScriptedEngine
from stages.ports import (
    BadRequestError,
    EngineBusyError,
    EngineHealth,
    EngineUnavailableError,
    GenerateRequest,
    NoEngineError,
    SamplingSettings,
    TokenChunk,
)
from stages.routing.router import Router
from stages.routing.settings import RoutingSettings

FAST = RoutingSettings(first_quarantine_s=0.01, wait_deadline_s=5.0)


class Engine:
    """Gives a token each time it is told to; `version` is what its tokens carry."""

    def __init__(self, name: str, *, version: int = 0) -> None:
        self.name = name
        self.version = version
        self.requests: list[GenerateRequest] = []
        self.failing = ""
        self.go = anyio.Event()
        self.go.set()
        self.closed = 0
        self.asked = anyio.Event()

    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        self.requests.append(request)
        self.asked.set()
        try:
            for number in range(request.settings.max_new_tokens):
                await self.go.wait()
                if self.failing:
                    raise EngineUnavailableError(self.failing)
                last = number == request.settings.max_new_tokens - 1
                yield TokenChunk(
                    token_ids=np.array([number], dtype=np.int32),
                    logprobs=np.zeros(1, dtype=np.float32),
                    version=self.version,
                    finish_reason=FinishReason.LENGTH if last else None,
                )
        finally:
            self.closed += 1

    async def health(self) -> EngineHealth:
        return EngineHealth(
            ready=not self.failing,
            version=self.version,
            num_running=0,
            num_waiting=0,
            max_context=99,
            detail=self.failing,
        )


def announced(name: str, **fields) -> EngineAnnouncement:
    return EngineAnnouncement(**{"name": name, "kind": "vllm", "state": EngineState.SERVING, "capacity": 4, **fields})


def request(number: int = 0, *, tokens: int = 2, min_version: int = 0, session: str = "") -> GenerateRequest:
    return GenerateRequest(
        request_id=f"r{number}",
        prompt_ids=np.arange(4, dtype=np.int32),
        settings=SamplingSettings(max_new_tokens=tokens),
        min_version=min_version,
        session=session,
    )


@asynccontextmanager
async def running(router: Router) -> AsyncGenerator[anyio.abc.TaskGroup]:
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(router.run)
        yield tasks
        tasks.cancel_scope.cancel()


async def collect(router: Router, asked: GenerateRequest) -> list[TokenChunk]:
    return [chunk async for chunk in router.generate(asked)]


async def test_calls_are_spread_over_the_engines_and_sessions_stay_where_they_are() -> None:
    router = Router(FAST)
    engines = [Engine(f"e{number}") for number in range(2)]
    for engine in engines:
        engine.go = anyio.Event()
        router.join(engine, announced(engine.name))
    async with running(router) as tasks:
        for number in range(4):
            tasks.start_soon(collect, router, request(number, session=f"s{number}"))
        await anyio.wait_all_tasks_blocked()
        assert [len(engine.requests) for engine in engines] == [2, 2]
        for engine in engines:
            engine.go.set()
        homes = {one.session: engine.name for engine in engines for one in engine.requests}
        for number in range(4):
            await collect(router, request(10 + number, session=f"s{number}"))
        later = {one.session: engine.name for engine in engines for one in engine.requests[2:]}
        assert later == homes


async def test_a_call_waits_for_an_engine_that_confirmed_its_version() -> None:
    router = Router(FAST)
    engine = Engine("e", version=1)
    router.join(engine, announced("e", version=1))
    async with running(router) as tasks:
        chunks: list[TokenChunk] = []

        async def ask() -> None:
            chunks.extend(await collect(router, request(min_version=2)))

        tasks.start_soon(ask)
        await anyio.wait_all_tasks_blocked()
        assert not engine.requests
        assert router.waits_for() == "an engine with version 2 or newer: e serves version 1"
        assert len(await collect(router, request(1, min_version=1))) == 2  # who can be served is not held up
        engine.version = 2
        router.hear(announced("e", version=2))
        await anyio.wait_all_tasks_blocked()
        assert [chunk.version for chunk in chunks] == [2, 2]


async def test_a_wait_ends_with_its_reason_and_says_whether_engines_are_full_or_missing() -> None:
    router = Router(RoutingSettings(wait_deadline_s=0.02))
    with pytest.raises(NoEngineError, match="an engine: none has joined"):
        await collect(router, request())
    engine = Engine("e")
    engine.go = anyio.Event()
    router.join(engine, announced("e", capacity=1))
    async with running(router) as tasks:
        tasks.start_soon(collect, router, request())
        await engine.asked.wait()
        with pytest.raises(EngineBusyError, match="e 1/1"):
            await collect(router, request(1))
        with pytest.raises(NoEngineError, match="version 9"):
            await collect(router, request(2, min_version=9))


async def test_waiting_calls_get_free_slots_in_their_order() -> None:
    router = Router(FAST)
    engine = Engine("e")
    engine.go = anyio.Event()
    router.join(engine, announced("e", capacity=1))
    async with running(router) as tasks:
        for number in range(4):
            tasks.start_soon(collect, router, request(number))
            await anyio.wait_all_tasks_blocked()
        engine.go.set()
        await anyio.wait_all_tasks_blocked()
        assert [one.request_id for one in engine.requests] == ["r0", "r1", "r2", "r3"]
        assert router.members[0].in_flight == 0


async def test_a_cancelled_wait_and_a_closed_answer_free_their_places() -> None:
    router = Router(FAST)
    engine = Engine("e")
    router.join(engine, announced("e", capacity=1))
    async with running(router):
        chunks = router.generate(request(tokens=9))
        await anext(chunks)
        with anyio.move_on_after(0.01):
            await collect(router, request(1))
        await chunks.aclose()
        assert (engine.closed, router.members[0].in_flight) == (1, 0)
        assert len(await collect(router, request(2))) == 2


async def test_a_failed_engine_is_quarantined_probed_and_comes_back(wait_until) -> None:
    router = Router(FAST)
    bad, good = Engine("a"), Engine("b")
    bad.failing = "the server is gone"
    router.join(bad, announced("a"))
    router.join(good, announced("b"))
    async with running(router):
        with pytest.raises(EngineUnavailableError, match="the server is gone"):
            await collect(router, request())
        for number in range(1, 4):
            await collect(router, request(number))
        assert (len(bad.requests), len(good.requests)) == (1, 3)
        quarantine = router.members[0].quarantine
        assert quarantine is not None
        assert quarantine.reason == "the server is gone"
        bad.failing = ""
        await wait_until(lambda: router.members[0].quarantine is None)


async def test_what_any_engine_would_refuse_quarantines_none() -> None:
    router = Router(FAST)
    router.join(ScriptedEngine(lambda _prompt, _number: [1], vocab_size=2), announced("scripted"))
    with pytest.raises(BadRequestError):
        await collect(router, request())
    assert router.members[0].quarantine is None
    assert router.members[0].in_flight == 0


async def test_requests_of_an_engine_whose_worker_says_that_it_died_go_on_at_once() -> None:
    router = Router(FAST)
    engine = Engine("e")
    engine.go = anyio.Event()  # it hangs: no error would ever come
    router.join(engine, announced("e", incarnation="1"))
    async with running(router) as tasks:
        failures: list[str] = []

        async def ask() -> None:
            try:
                await collect(router, request())
            except EngineUnavailableError as error:
                failures.append(str(error))

        tasks.start_soon(ask)
        await engine.asked.wait()
        router.hear(announced("e", state=EngineState.STARTING, reason="it did not answer for 15 s", incarnation="1"))
        await anyio.wait_all_tasks_blocked()
        assert failures == ["e went away: starting: it did not answer for 15 s"]
        assert engine.closed == 1


async def test_tokens_older_than_a_call_may_have_are_never_passed_on() -> None:
    router = Router(RoutingSettings(first_quarantine_s=0.01, wait_deadline_s=0.1))
    engine = Engine("e", version=0)  # it started anew, and its worker has not said so yet
    router.join(engine, announced("e", version=7))
    async with running(router):
        with pytest.raises(EngineUnavailableError, match="version 7 or newer, found tokens of version 0"):
            await collect(router, request(min_version=7))
        with pytest.raises(NoEngineError):
            await collect(router, request(1, min_version=7))
        assert len(engine.requests) == 1


async def test_an_engine_that_is_not_heard_gets_nothing_and_then_leaves() -> None:
    now = [0.0]
    router = Router(RoutingSettings(wait_deadline_s=0.01), now=lambda: now[0])
    router.join(Engine("e"), announced("e"))
    now[0] = 6.0
    with pytest.raises(NoEngineError, match="e was not heard for 6 s"):
        await collect(router, request())
    router.hear(announced("e"))
    assert len(await collect(router, request())) == 2
    now[0] = 40.0
    assert router.forget_silent() == ["e"]
    assert router.members == []


async def test_a_wait_names_an_engine_whose_server_starts_as_long_as_it_is_heard() -> None:
    now = [0.0]
    router = Router(RoutingSettings(wait_deadline_s=0.01), now=lambda: now[0])
    router.away(announced("e", state=EngineState.STARTING, reason="the server starts"))
    with pytest.raises(NoEngineError, match="an engine: e starting: the server starts"):
        await collect(router, request())
    now[0] = 6.0
    router.forget_silent()
    with pytest.raises(NoEngineError, match="none has joined"):
        await collect(router, request())


async def test_an_engine_that_queues_gets_fewer_requests() -> None:
    router = Router(RoutingSettings(congestion_period_s=0.0))
    router.join(Engine("e"), announced("e", capacity=10))
    router.hear(announced("e", capacity=10, running=10, waiting=5))
    assert router.members[0].limit == pytest.approx(7.0)
    for number in range(60):
        await collect(router, request(number))
    assert router.members[0].limit == 10


async def test_an_engine_that_drains_finishes_what_it_has_and_gets_nothing_new() -> None:
    router = Router(RoutingSettings(wait_deadline_s=0.02))
    engine = Engine("e")
    router.join(engine, announced("e"))
    chunks = router.generate(request(tokens=3))
    await anext(chunks)
    router.hear(announced("e", state=EngineState.DRAINING))
    with pytest.raises(NoEngineError, match="e draining"):
        await collect(router, request(1))
    assert len([chunk async for chunk in chunks]) == 2


async def test_loads_of_other_gateways_count() -> None:
    router = Router(FAST)
    busy, idle = Engine("a"), Engine("b")
    router.join(busy, announced("a"))
    router.join(idle, announced("b"))
    router.hear(msgspec.structs.replace(announced("a"), running=3))
    await collect(router, request())
    assert len(idle.requests) == 1
