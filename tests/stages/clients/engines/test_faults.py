"""What servers do wrong, and what the caller sees: each pitfall of vLLM and SGLang by its name. In-process fakes."""

import anyio
import anyio.lowlevel
import pytest
from asking import ask, collect, ids_of, versions_of
from fake_servers import MAX_CONTEXT, VOCAB_SIZE, FakeServer, serving
from waiting import wait_until

from schemas.config import EngineKind
from schemas.messages.rollout import FinishReason
from stages.clients.engines import HttpEngineSettings, http_engine
from stages.ports import (
    BadRequestError,
    ContextOverflowError,
    EngineError,
    EngineUnavailableError,
    SwapMode,
    WeightsRefusedError,
)

KINDS = [EngineKind.VLLM, EngineKind.SGLANG]


@pytest.fixture(params=KINDS, ids=str)
def fake(request, versions) -> FakeServer:
    return FakeServer(request.param, versions[0])


@pytest.fixture
async def engine(fake):
    async with serving(fake) as url, http_engine(fake.kind, "e", url, HttpEngineSettings(**FAST)) as engine:
        yield engine


FAST = {"confirm_interval_s": 0.0, "call_timeout_s": 5.0}


# -- before anything is sent


@pytest.mark.parametrize(
    ("request_", "error", "message"),
    [
        (ask(prompt=[]), BadRequestError, "prompt token"),
        (ask(prompt=[VOCAB_SIZE]), BadRequestError, str(VOCAB_SIZE)),
        (ask(prompt=[-1]), BadRequestError, "-1"),
        (ask(n=MAX_CONTEXT - 9), ContextOverflowError, str(MAX_CONTEXT)),
        (ask(min_version=1), EngineUnavailableError, "version 1"),
    ],
)
async def test_what_would_kill_or_confuse_a_server_is_refused_before_it_is_sent(fake, engine, request_, error, message):
    with pytest.raises(error, match=message):
        await collect(engine, request_)
    assert not fake.bodies


async def test_a_server_whose_vocabulary_is_unknown_is_not_spoken_to(fake):
    fake.folder = "/nowhere"
    async with serving(fake) as url:
        with pytest.raises(EngineError, match="give vocab_size"):
            async with http_engine(fake.kind, "e", url):
                pass
        async with http_engine(fake.kind, "e", url, HttpEngineSettings(vocab_size=VOCAB_SIZE)) as engine:
            assert len(ids_of(await collect(engine, ask()))) == 12


async def test_vllm_is_told_the_model_that_it_serves(versions):
    fake = FakeServer(EngineKind.VLLM, versions[0])
    async with serving(fake) as url:
        with pytest.raises(EngineUnavailableError, match="serve the model other, found policy"):
            async with http_engine(fake.kind, "e", url, HttpEngineSettings(model="other")):
                pass


async def test_the_key_comes_from_the_environment_and_stands_in_no_message(fake, monkeypatch):
    settings = HttpEngineSettings(api_key_env="ENGINE_KEY", call_timeout_s=1.0)
    async with serving(fake) as url:
        with pytest.raises(EngineError, match="ENGINE_KEY"):
            async with http_engine(fake.kind, "e", url, settings):
                pass
        monkeypatch.setenv("ENGINE_KEY", "k-secret")
        async with http_engine(fake.kind, "e", url, settings) as engine:
            fake.fault = "error_500"
            with pytest.raises(EngineUnavailableError) as told:
                await collect(engine, ask())
    assert all(headers["Authorization"] == "Bearer k-secret" for headers in fake.headers)
    assert "k-secret" not in str(told.value)


# -- streams


async def test_tokens_before_a_dropped_connection_are_handed_out_and_then_the_error(fake, engine):
    fake.fault, fake.fault_after = "broken", 5
    fake.token_gate = anyio.Semaphore(0)
    chunks = engine.generate(ask())
    found = []
    for _ in range(5):
        fake.token_gate.release()
        found.append(await anext(chunks))
    fake.token_gate.release()
    with pytest.raises(EngineUnavailableError, match="connection failed"):
        await anext(chunks)
    assert ids_of(found).tolist() == [10, 11, 12, 13, 14]
    assert versions_of(found) == [0] * 5


@pytest.mark.parametrize(
    ("fault", "error", "message"),
    [
        ("unfinished", EngineUnavailableError, "without saying why"),
        ("garbage", EngineUnavailableError, "502"),
        ("nan", EngineUnavailableError, "no numbers"),
        ("error_in_stream", EngineUnavailableError, "EngineCore died"),
        ("torn_event", EngineUnavailableError, r"connection failed|within an event"),
        ("error_500", EngineUnavailableError, "500: the engine is dead"),
    ],
)
async def test_a_stream_that_is_none_makes_the_engine_unavailable(fake, engine, fault, error, message):
    fake.fault = fault
    with pytest.raises(error, match=message):
        await collect(engine, ask())
    fake.fault = ""
    assert len(ids_of(await collect(engine, ask()))) == 12, "the pool serves on after a connection that was closed"


async def test_a_silent_server_is_unavailable_after_a_while(fake):
    fake.token_gate = anyio.Semaphore(0)
    settings = HttpEngineSettings(silence_timeout_s=0.2, **FAST)
    async with serving(fake) as url, http_engine(fake.kind, "e", url, settings) as engine:
        with pytest.raises(EngineUnavailableError, match=r"silent for 0\.2 s"):
            await collect(engine, ask())


async def test_nobody_at_the_address():
    with pytest.raises(EngineUnavailableError, match="connection failed"):
        async with http_engine(EngineKind.VLLM, "e", "http://127.0.0.1:9"):
            pass


async def test_sglang_may_tell_everything_from_the_start_each_time(versions):
    fake = FakeServer(EngineKind.SGLANG, versions[0])
    fake.cumulative = True
    async with serving(fake) as url, http_engine(fake.kind, "e", url) as engine:
        assert ids_of(await collect(engine, ask(n=6))).tolist() == [10, 11, 12, 13, 14, 15]


async def test_an_id_that_begins_another_is_not_aborted_with_it(versions):
    """SGLang ends every request whose id begins with the one that is given."""
    fake = FakeServer(EngineKind.SGLANG, versions[0])
    fake.token_gate = anyio.Semaphore(2)
    found = {}

    async def one(name):
        found[name] = await collect(engine, ask(name, 4))

    async with serving(fake) as url, http_engine(fake.kind, "e", url) as engine, anyio.create_task_group() as tasks:
        tasks.start_soon(one, "a1")
        tasks.start_soon(one, "a10")
        await wait_until(lambda: len(fake.bodies) == 2)
        await engine.abort("a1")
        for _ in range(8):
            fake.token_gate.release()
    assert found["a1"][-1].finish_reason is FinishReason.ABORT
    assert found["a10"][-1].finish_reason is FinishReason.LENGTH


async def test_an_abort_of_nobody_never_becomes_an_abort_of_everybody(fake, engine):
    """vLLM ends every request when the list of ids is empty, SGLang when the id is."""
    await engine.abort("")
    await engine.abort("nobody")
    assert not [call for call in fake.calls if "abort" in call]


async def test_leaving_an_answer_aborts_it_at_the_server(fake, engine):
    fake.token_gate = anyio.Semaphore(1)
    chunks = engine.generate(ask())
    await anext(chunks)
    await chunks.aclose()
    assert [call for call in fake.calls if "abort" in call]
    await wait_until(lambda: not fake.running)


async def test_prefixes_of_former_weights_are_out_of_reach(fake, engine, versions):
    """Whatever the server's cache still holds: requests of another version have another salt."""
    await collect(engine, ask())
    await engine.load_weights(versions[1], 1, SwapMode.IN_PLACE)
    await collect(engine, ask())
    assert [body["cache_salt"] for body in fake.bodies] == ["w0", "w1"]


# -- versions


async def test_tokens_around_a_swap_wait_for_the_servers_word(fake, engine, versions):
    fake.token_gate = anyio.Semaphore(3)
    found = []
    stream = engine.generate(ask(n=8))
    while sum(len(chunk.token_ids) for chunk in found) < 3:
        found.append(await anext(stream))
    await engine.load_weights(versions[1], 1, SwapMode.IN_PLACE)
    for _ in range(6):
        fake.token_gate.release()
    found += [chunk async for chunk in stream]
    assert versions_of(found) == [0] * 3 + [1] * 5
    assert all(len({chunk.version}) == 1 for chunk in found)
    assert found[-1].finish_reason is FinishReason.LENGTH


async def test_a_swap_by_another_client_is_seen(fake, versions):
    async with (
        serving(fake) as url,
        http_engine(fake.kind, "loader", url, HttpEngineSettings(**FAST)) as loader,
        http_engine(fake.kind, "reader", url, HttpEngineSettings(**FAST)) as reader,
    ):
        await loader.load_weights(versions[1], 1, SwapMode.RECOMPUTE)
        found = await collect(reader, ask(min_version=1))
        assert versions_of(found) == [1] * 12
        await loader.load_weights(versions[2], 2, SwapMode.RECOMPUTE)
        assert set(versions_of(await collect(reader, ask()))) == {2}


async def test_a_server_that_went_back_to_old_weights_is_not_believed(fake, engine, versions):
    await engine.load_weights(versions[1], 1, SwapMode.RECOMPUTE)
    fake.label = "default"  # started anew
    fake.token_gate = anyio.Semaphore(1)
    with pytest.raises(EngineUnavailableError, match=r"started anew|expected"):
        await collect(engine, ask())


# -- swaps that fail


def swap_path(kind: EngineKind) -> str:
    return "/collective_rpc" if kind is EngineKind.VLLM else "/update_weights_from_disk"


async def test_a_failed_load_is_taken_back_and_the_old_version_serves_on(fake, engine, versions):
    """vLLM is half loaded after it, and dies of the next request, while /health says 200."""
    fake.failing_paths[swap_path(fake.kind)] = 500 if fake.kind is EngineKind.VLLM else 400
    with pytest.raises(WeightsRefusedError, match="version 0 serves on"):
        await engine.load_weights(versions[1], 1, SwapMode.RECOMPUTE)
    assert fake.loaded == [versions[0]], "the former weights were loaded again"
    assert (await engine.health()).version == 0
    assert versions_of(await collect(engine, ask())) == [0] * 12
    await engine.load_weights(versions[1], 1, SwapMode.RECOMPUTE)
    assert versions_of(await collect(engine, ask())) == [1] * 12


async def test_an_engine_that_cannot_be_brought_back_is_shut_until_a_load_succeeds(fake, engine, versions):
    fake.dying_paths.add(swap_path(fake.kind))
    fake.token_gate = anyio.Semaphore(1)
    failed = []

    async def running():
        with pytest.raises(EngineUnavailableError):
            await collect(engine, ask("running"))
        failed.append(True)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(running)
        await wait_until(lambda: fake.num_generated)
        with pytest.raises(EngineUnavailableError, match="must be replaced"):
            await engine.load_weights(versions[1], 1, SwapMode.RECOMPUTE)
    assert failed, "whoever waits for a half-loaded engine is told"
    fake.token_gate = None
    num = len(fake.bodies)
    with pytest.raises(EngineUnavailableError, match="must be replaced"):
        await collect(engine, ask())
    assert len(fake.bodies) == num
    health = await engine.health()
    assert (health.ready, "version 1" in health.detail) == (False, True)
    fake.dying_paths.clear()
    await engine.load_weights(versions[2], 2, SwapMode.RECOMPUTE)
    assert versions_of(await collect(engine, ask())) == [2] * 12


async def test_vllm_that_keeps_old_keys_of_running_requests_is_not_taken_for_exact(versions):
    fake = FakeServer(EngineKind.VLLM, versions[0])
    async with serving(fake) as url, http_engine(fake.kind, "e", url, HttpEngineSettings(**FAST)) as engine:
        fake.failing_paths["/reset_prefix_cache"] = 500
        with pytest.raises(WeightsRefusedError, match="version 0 serves on"):
            await engine.load_weights(versions[1], 1, SwapMode.RECOMPUTE)


@pytest.mark.parametrize(("device", "extension"), [("cpu", "headrace_vllm.WholeReload"), ("cuda", ""), ("cpu", "")])
async def test_vllm_on_cpus_keeps_a_tied_heads_first_weights_and_is_not_given_others_without_the_extension(
    versions, device, extension
):
    fake = FakeServer(EngineKind.VLLM, versions[0])
    fake.device, fake.worker_extension = device, extension
    async with serving(fake) as url, http_engine(fake.kind, "e", url, HttpEngineSettings(**FAST)) as engine:
        if (device, extension) == ("cpu", ""):
            with pytest.raises(WeightsRefusedError, match="worker-extension-cls"):
                await engine.load_weights(versions[1], 1, SwapMode.RECOMPUTE)
            assert not fake.reload_methods
            return
        await engine.load_weights(versions[1], 1, SwapMode.RECOMPUTE)
    assert fake.reload_methods == ["reload_weights_and_heads" if device == "cpu" else "reload_weights"]


async def test_a_drain_that_takes_too_long_is_given_up(fake, versions):
    fake.token_gate = anyio.Semaphore(1)
    settings = HttpEngineSettings(drain_timeout_s=0.1, **FAST)
    async with serving(fake) as url, http_engine(fake.kind, "e", url, settings) as engine:
        stream = engine.generate(ask(n=3))
        first = await anext(stream)
        with pytest.raises(WeightsRefusedError, match="version 1 is not loaded"):
            await engine.load_weights(versions[1], 1, SwapMode.DRAIN)
        for _ in range(3):
            fake.token_gate.release()
        rest = [chunk async for chunk in stream]
        assert versions_of([first, *rest]) == [0] * 3
        assert not fake.loaded


async def test_a_paused_engine_stays_paused_through_a_swap(fake, engine, versions):
    await engine.pause()
    await engine.load_weights(versions[1], 1, SwapMode.RECOMPUTE)
    assert not fake.go.is_set()
    await engine.resume()
    assert versions_of(await collect(engine, ask())) == [1] * 12


async def test_new_weights_are_compared_with_the_folder_that_the_server_was_started_with(fake, versions):
    fake.folder = "/elsewhere"
    async with (
        serving(fake) as url,
        http_engine(fake.kind, "e", url, HttpEngineSettings(vocab_size=VOCAB_SIZE)) as engine,
    ):
        with pytest.raises(WeightsRefusedError, match="as seen from here"):
            await engine.load_weights(versions[1], 1, SwapMode.RECOMPUTE)
    settings = HttpEngineSettings(model_folder=versions[0])
    async with serving(fake) as url, http_engine(fake.kind, "e", url, settings) as engine:
        await engine.load_weights(versions[1], 1, SwapMode.RECOMPUTE)
    assert fake.loaded == [versions[1]]


async def test_a_swap_whose_caller_is_cancelled_is_finished(fake, engine, versions):
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(engine.load_weights, versions[1], 1, SwapMode.RECOMPUTE)
        with anyio.fail_after(5):
            while not [call for call in fake.calls if "pause" in call]:
                await anyio.lowlevel.checkpoint()
        tasks.cancel_scope.cancel()
    assert versions_of(await collect(engine, ask())) == [1] * 12
    assert fake.go.is_set()
