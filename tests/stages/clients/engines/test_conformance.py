"""One suite for every `InferenceEngine`: the built-in one, the scripted one, and both kinds of servers, faked and real.

A scripted engine samples nothing: what depends on the model is left out for it.
"""

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager

import anyio
import numpy as np
import pytest
from asking import ask, collect, ids_of, versions_of
from fake_servers import FakeServer, serving

from schemas.config import EngineKind
from schemas.messages.rollout import FinishReason
from stages.clients.engines import http_engine
from stages.engine.scripted import ScriptedEngine
from stages.ports import (
    BadRequestError,
    ContextOverflowError,
    EngineUnavailableError,
    InferenceEngine,
    Sleeps,
    SwapMode,
    WeightsRefusedError,
)

ENGINES = ["builtin", "scripted", "fake vllm", "fake sglang"]
REAL = [pytest.param(name, marks=[pytest.mark.resources, pytest.mark.timeout(1500)]) for name in ("vllm", "sglang")]
LONG = 150


class Case:
    """An engine and what is known of it."""

    def __init__(self, name: str, engine: InferenceEngine, version: int, max_context: int):
        self.name = name
        self.engine = engine
        self.version = version
        """That it serves at the test's beginning."""
        self.max_context = max_context

    @property
    def samples(self) -> bool:
        return self.name != "scripted"


@asynccontextmanager
async def opened(name: str, versions, request) -> AsyncIterator[InferenceEngine]:
    if name == "scripted":
        yield ScriptedEngine(
            lambda prompt, _: [(prompt[-1] + 1 + i) % 200 for i in range(LONG)], max_context=256, chunk_tokens=1
        )
    elif name == "builtin":
        from stages.engine.builtin import BuiltinEngineSettings, builtin_engine  # noqa: PLC0415 - torch, only for it

        async with builtin_engine("e", versions[0], BuiltinEngineSettings(max_context=256, steps_per_hop=2)) as engine:
            yield engine
    elif name.startswith("fake"):
        fake = FakeServer(EngineKind(name.removeprefix("fake ")), versions[0])
        async with serving(fake) as url, http_engine(fake.kind, "e", url) as engine:
            yield engine
    else:
        async with http_engine(EngineKind(name), "e", request.getfixturevalue(f"{name}_url")) as engine:
            yield engine


@pytest.fixture(params=[*ENGINES, *REAL])
def open_case(request, versions) -> Callable[[], AbstractAsyncContextManager[Case]]:
    """Opened within the test: an engine's tasks end where they began."""

    @asynccontextmanager
    async def opening() -> AsyncIterator[Case]:
        async with opened(request.param, versions, request) as engine:
            health = await engine.health()
            yield Case(request.param, engine, health.version, health.max_context)

    return opening


async def test_an_answer_is_whole_and_each_chunk_of_one_version(open_case):
    async with open_case() as case:
        chunks = await collect(case.engine, ask(n=20))
        assert ids_of(chunks).dtype == np.int32
        assert len(ids_of(chunks)) == 20
        logprobs = np.concatenate([chunk.logprobs for chunk in chunks])
        assert (logprobs.dtype, len(logprobs)) == (np.float32, 20)
        assert np.isfinite(logprobs).all()
        assert (logprobs <= 1e-6).all()
        assert [chunk.finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + [FinishReason.LENGTH]
        assert set(versions_of(chunks)) == {case.version}


async def test_a_stop_token_ends_the_answer_and_is_its_last_id(open_case):
    async with open_case() as case:
        greedy = {"temperature": 0.0} if case.samples else {}
        free = ids_of(await collect(case.engine, ask(n=10, **greedy))).tolist()
        stop = free[4]
        chunks = await collect(case.engine, ask(n=10, stop_token_ids=(stop,), **greedy))
        assert ids_of(chunks).tolist() == free[: free.index(stop) + 1]
        assert (chunks[-1].finish_reason, chunks[-1].stop_reason) == (FinishReason.STOP, stop)


async def test_greedy_answers_repeat_and_so_do_many_at_once(open_case):
    async with open_case() as case:
        answers = []

        async def one(number):
            answers.append(ids_of(await collect(case.engine, ask(f"r{number}", 12, temperature=0.0))).tolist())

        async with anyio.create_task_group() as tasks:
            for number in range(12):
                tasks.start_soon(one, number)
        assert len(answers) == 12
        if case.samples:
            assert all(ids == answers[0] for ids in answers)


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"prompt": []}, BadRequestError),
        ({"prompt": [300]}, BadRequestError),
        ({"prompt": [-1]}, BadRequestError),
        ({"n": 0}, BadRequestError),
        ({"temperature": -1.0}, BadRequestError),
        ({"top_p": 0.0}, BadRequestError),
        ({"n": 2**20}, ContextOverflowError),
        ({"min_version": 10_000}, EngineUnavailableError),
    ],
)
async def test_what_cannot_be_sampled_is_refused_by_type(open_case, fields, error):
    async with open_case() as case:
        with pytest.raises(error):
            await collect(case.engine, ask(**fields))


async def test_the_whole_context_can_be_used(open_case):
    async with open_case() as case:
        prompt = list(range(case.max_context - 20))
        assert len(ids_of(await collect(case.engine, ask(n=20, prompt=[i % 250 for i in prompt])))) == 20


async def test_an_abort_ends_the_answer_with_what_it_has(open_case):
    async with open_case() as case:
        async with aclosing(case.engine.generate(ask("a", LONG))) as chunks:
            found = [await anext(chunks)]
            await case.engine.abort("nobody")
            await case.engine.abort("a")
            found += [chunk async for chunk in chunks]
        assert found[-1].finish_reason in (FinishReason.ABORT, FinishReason.LENGTH)  # it may have been quicker
        assert len(ids_of(found)) == len(versions_of(found)) <= LONG


async def test_leaving_an_answer_frees_the_engine(open_case, wait_until):
    async with open_case() as case:
        async with aclosing(case.engine.generate(ask("a", LONG))) as chunks:
            await anext(chunks)

        async def idle():
            health = await case.engine.health()
            return health.num_running + health.num_waiting == 0

        await wait_until(idle)
        assert len(ids_of(await collect(case.engine, ask("a", 3)))) == 3


async def test_a_pause_keeps_requests_and_lets_no_token_through(open_case):
    async with open_case() as case:
        await case.engine.pause()
        found = []

        async def one():
            found.extend(await collect(case.engine, ask("a", 5)))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(one)
            for _ in range(3):
                await case.engine.health()
            assert not found
            await case.engine.resume()
        assert len(ids_of(found)) == 5


async def test_a_sleeping_engine_wakes_with_its_weights(open_case):
    async with open_case() as case:
        if not isinstance(case.engine, Sleeps):
            pytest.skip("it has nothing to give up")
        before = ids_of(await collect(case.engine, ask("a", 6, temperature=0.0))).tolist()
        await case.engine.sleep()
        await case.engine.wake()
        assert ids_of(await collect(case.engine, ask("a", 6, temperature=0.0))).tolist() == before


@pytest.mark.parametrize("mode", list(SwapMode))
async def test_new_weights_serve_from_then_on_and_running_answers_say_what_sampled_them(open_case, versions, mode):
    async with open_case() as case:
        new = case.version + 1
        found = []
        begun = anyio.Event()

        async def running():
            async with aclosing(case.engine.generate(ask("running", LONG))) as chunks:
                async for chunk in chunks:
                    found.append(chunk)
                    begun.set()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(running)
            await begun.wait()
            await case.engine.load_weights(versions[new % len(versions)], new, mode)
            assert (await case.engine.health()).version == new
            assert set(versions_of(await collect(case.engine, ask("after", 5, min_version=new)))) == {new}
        assert versions_of(found) == sorted(versions_of(found))
        assert set(versions_of(found)) <= {case.version, new}
        assert found[-1].finish_reason in (FinishReason.LENGTH, FinishReason.ABORT)
        if mode is not SwapMode.ABORT:
            assert len(ids_of(found)) == LONG
        if mode in (SwapMode.ABORT, SwapMode.DRAIN) and case.samples:
            assert set(versions_of(found)) == {case.version}


async def test_weights_that_are_not_there_are_refused_and_the_old_ones_serve_on(open_case, tmp_path):
    async with open_case() as case:
        before = ids_of(await collect(case.engine, ask(n=6, temperature=0.0))).tolist()
        with pytest.raises(WeightsRefusedError):
            await case.engine.load_weights(str(tmp_path / "nowhere"), case.version + 1, SwapMode.RECOMPUTE)
        assert (await case.engine.health()).version == case.version
        if case.samples:
            assert ids_of(await collect(case.engine, ask(n=6, temperature=0.0))).tolist() == before
