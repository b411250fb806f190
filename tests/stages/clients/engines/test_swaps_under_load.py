"""New weights while requests run, on real servers, against transformers: ids, log-probs, versions, and nothing lost."""

from contextlib import aclosing

import anyio
import numpy as np
import pytest
from real_servers import NUM_VERSIONS, greedy_ids, logprobs
from waiting import wait_until

from schemas.messages.rollout import FinishReason
from stages.clients.engines import HttpEngineSettings, http_engine
from stages.ports import GenerateRequest, SamplingSettings, SwapMode, TokenChunk

TEMPERATURE = 0.8
PREFIX = np.arange(40, 88, dtype=np.int32)
"""All prompts begin with it: three blocks of a prefix cache."""
NUM_STREAMS = 6
NUM_NEW = 90


class Answer:
    """One request to its end, over as many calls as aborts made it take."""

    def __init__(self, prompt, version: int):
        self.prompt = prompt
        self.sent_at = version
        """What served when it was asked for: prefixes that this version left in the cache may be its own."""
        self.ids: list[int] = []
        self.logprobs: list[float] = []
        self.versions: list[int] = []
        self.calls: list[int] = []
        """Where each call began."""
        self.finish = None

    def add(self, chunk):
        self.ids += chunk.token_ids.tolist()
        self.logprobs += chunk.logprobs.tolist()
        self.versions += [chunk.version] * len(chunk.token_ids)
        self.finish = chunk.finish_reason


async def answer(engine, found: Answer, name: str) -> None:
    prompt = found.prompt
    while found.finish in (None, FinishReason.ABORT):
        found.calls.append(len(found.ids))
        request = GenerateRequest(
            request_id=f"{name}.{len(found.calls)}",
            prompt_ids=np.concatenate([prompt, np.array(found.ids, dtype=np.int32)]),
            settings=SamplingSettings(max_new_tokens=NUM_NEW - len(found.ids), temperature=TEMPERATURE),
        )
        async with aclosing(engine.generate(request)) as chunks:
            async for chunk in chunks:
                found.add(chunk)
        if len(found.ids) == NUM_NEW:  # aborted after its last token
            break


class LoadOnEngine:
    """Streams of requests, one after the other in each, until told to stop."""

    def __init__(self, engine, version: int):
        self.engine = engine
        self.version = version
        """The newest whose load is over."""
        self.random = np.random.default_rng(version)
        self.answers: list[Answer] = []
        self.running: list[Answer] = []
        self.num_started = 0
        self.stopping = False

    async def stream(self, number: int):
        while not self.stopping:
            self.num_started += 1
            tail = self.random.integers(0, 250, size=int(self.random.integers(1, 20)))
            one = Answer(np.concatenate([PREFIX, tail]).astype(np.int32), self.version)
            self.running.append(one)
            await answer(self.engine, one, f"s{number}-{self.num_started}")
            self.running.remove(one)
            self.answers.append(one)

    async def tokens(self, count: int):
        """Wait until so many more tokens came, and an answer is under way whose end is far."""
        until = self.engine.num_tokens + count

        def have_come() -> bool:
            begun = any(1 <= len(one.ids) <= NUM_NEW // 3 for one in self.running)
            return begun and self.engine.num_tokens >= until

        await wait_until(have_come, f"{count} more tokens", deadline_s=120)


async def swaps_under_load(kind, url, versions, mode, *, num_swaps: int, adapters: tuple[str, ...] = ()) -> None:
    """Args:
    versions: model folders; the server started with the first one.
    adapters: folders of adapters on the first version, to be loaded instead of the other versions.
    """
    async with http_engine(kind, "e", url, HttpEngineSettings(adapters=bool(adapters))) as engine:
        first = (await engine.health()).version
        if first and not adapters:  # another test's weights
            first += 1
            await engine.load_weights(versions[first % NUM_VERSIONS], first, SwapMode.RECOMPUTE)
        load = LoadOnEngine(engine, first)
        choices = adapters or versions
        folders = {first: choices[first % NUM_VERSIONS] if first or not adapters else versions[0]}
        greedy: dict[int, list[TokenChunk]] = {}
        async with anyio.create_task_group() as tasks:
            for number in range(NUM_STREAMS):
                tasks.start_soon(load.stream, number)
            for version in range(first + 1, first + num_swaps + 1):
                await load.tokens(80)
                folders[version] = choices[version % NUM_VERSIONS]
                await (engine.load_adapter if adapters else engine.load_weights)(folders[version], version, mode)
                load.version = version
                greedy[version] = await ask_greedy(engine, version)
            await load.tokens(40)
            load.stopping = True
        health = await engine.health()
    assert (health.ready, health.version, health.num_running + health.num_waiting) == (True, first + num_swaps, 0)
    # only now: transformers would hold up the load meanwhile
    for version, chunks in greedy.items():
        check_greedy(chunks, folders[version], version)
    check_answers(load, folders, mode, adapters=bool(adapters))


async def ask_greedy(engine, version: int) -> list[TokenChunk]:
    """The first tokens after a swap, with a prompt whose prefix was cached under the former weights."""
    request = GenerateRequest(
        request_id=f"greedy-{version}",
        prompt_ids=PREFIX,
        settings=SamplingSettings(max_new_tokens=12, temperature=0.0),
        min_version=version,
    )
    return [chunk async for chunk in engine.generate(request)]


def check_greedy(chunks: list[TokenChunk], folder: str, version: int) -> None:
    assert {chunk.version for chunk in chunks} == {version}
    ids = np.concatenate([chunk.token_ids for chunk in chunks])
    assert ids.tolist() == greedy_ids(folder, PREFIX, 12)
    told = np.concatenate([chunk.logprobs for chunk in chunks])
    np.testing.assert_allclose(told, logprobs(folder, PREFIX, ids, 0.0), atol=1e-4)


def is_of(one: Answer, version: int, folders: dict[int, str], told: float, place: int) -> bool:
    """Whether this log-prob is what a version says of the token at a place of an answer."""
    expected = logprobs(folders[version], one.prompt, np.array(one.ids, dtype=np.int32), TEMPERATURE)
    return bool(abs(expected[place] - told) < 1e-4)


def check_answers(load: LoadOnEngine, folders: dict[int, str], mode: SwapMode, *, adapters: bool) -> None:
    assert len(load.answers) == load.num_started, "a request was lost"
    num_across, num_late, largest = 0, 0, 0.0
    for one in load.answers:
        assert len(one.ids) == NUM_NEW
        assert one.versions == sorted(one.versions)
        num_across += len(set(one.versions)) > 1
        for version in sorted(set(one.versions)):
            expected = logprobs(folders[version], one.prompt, np.array(one.ids, dtype=np.int32), TEMPERATURE)
            where = np.array(one.versions) == version
            told = np.array(one.logprobs)[where]
            if mode is SwapMode.IN_PLACE and not adapters and version > one.sent_at:
                # sampled over keys and values of older weights: as neither version alone would
                num_late += version != one.versions[0] and is_of(one, version - 1, folders, told[0], where.argmax())
                continue
            np.testing.assert_allclose(told, expected[where], atol=1e-4)
            largest = max(largest, float(np.abs(told - expected[where]).max()))
        if mode is SwapMode.DRAIN or (adapters and len(one.calls) == 1):
            assert len(set(one.versions)) == 1
    assert num_late <= 1, "tokens that the former version sampled count as of the new one"  # one may be near by chance
    if mode is SwapMode.ABORT or (mode is not SwapMode.DRAIN and not adapters):
        assert num_across >= 1, "no request ran across a swap"
    print(  # noqa: T201 - the figures, with -s
        f"{mode}: {len(folders) - 1} swaps, {len(load.answers)} answers, {num_across} across a swap, log-probs differ by {largest:.1e}"
    )
    if mode is SwapMode.ABORT:
        assert all(len(one.calls) > 1 for one in load.answers if len(set(one.versions)) > 1)


@pytest.mark.resources
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("mode", list(SwapMode))
async def test_swaps_under_load(real, versions, mode):
    await swaps_under_load(*real, versions, mode, num_swaps=3)


@pytest.mark.resources
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("mode", list(SwapMode))
async def test_adapters_under_load(real_with_adapters, versions, adapters, mode):
    await swaps_under_load(*real_with_adapters, versions, mode, num_swaps=5, adapters=adapters)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("mode", list(SwapMode))
async def test_twenty_swaps_under_load(real, versions, mode):
    await swaps_under_load(*real, versions, mode, num_swaps=20)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("mode", list(SwapMode))
async def test_twenty_adapters_under_load(real_with_adapters, versions, adapters, mode):
    await swaps_under_load(*real_with_adapters, versions, mode, num_swaps=20, adapters=adapters)
