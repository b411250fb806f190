"""LoRA adapters on servers: which request asks for which, whose version tokens have, what is refused and what is forgotten."""

from contextlib import aclosing, asynccontextmanager
from functools import partial
from pathlib import Path

import anyio
import pytest
import torch
from adapter_folders import write_adapter
from asking import ask, collect, ids_of, versions_of
from fake_servers import FakeServer, serving

from schemas.config import EngineKind
from schemas.messages.rollout import FinishReason
from stages.clients.engines import HttpEngineSettings, http_engine
from stages.clients.engines.vllm import adapters_in_use
from stages.ports import EngineUnavailableError, SwapMode, TakesAdapters, WeightsRefusedError

LONG = 40
KINDS = [EngineKind.VLLM, EngineKind.SGLANG]


@pytest.fixture(scope="module")
def adapter(tmp_path_factory, versions) -> str:
    return write_adapter(tmp_path_factory.mktemp("adapter") / "a", versions[0], seed=1)


@pytest.fixture(params=KINDS, ids=str)
def fake(request, versions) -> FakeServer:
    server = FakeServer(request.param, versions[0])
    server.max_adapters = 3
    return server


@asynccontextmanager
async def engine_of(fake: FakeServer, **settings):
    async with (
        serving(fake) as url,
        http_engine(fake.kind, "e", url, HttpEngineSettings(adapters=True, **settings)) as engine,
    ):
        yield engine


def asked_adapter(body: dict) -> str:
    return body.get("lora_path", "") if "rid" in body else body["model"].removeprefix("policy")


class Held:
    """A request that runs until it is let go, on a server whose tokens take permits."""

    def __init__(self, engine, fake: FakeServer, tasks, name: str, num_tokens: int = LONG):
        self.chunks: list = []
        self.ended = anyio.Event()
        self._fake = fake
        self._begun = anyio.Event()
        tasks.start_soon(self._run, engine, ask(name, num_tokens))

    async def _run(self, engine, request):
        async with aclosing(engine.generate(request)) as chunks:
            async for chunk in chunks:
                self.chunks.append(chunk)
                self._begun.set()
        self.ended.set()

    async def begun(self):
        self._fake.token_gate.release()
        await self._begun.wait()


async def test_each_request_names_the_adapter_of_its_version_which_its_tokens_have(fake, adapter):
    async with engine_of(fake) as engine:
        assert isinstance(engine, TakesAdapters)
        await collect(engine, ask("zero", 3))
        for version in (1, 2):
            await engine.load_adapter(adapter, version, SwapMode.RECOMPUTE)
            assert set(versions_of(await collect(engine, ask(f"v{version}", 3, min_version=version)))) == {version}
        names = [asked_adapter(body) for body in fake.bodies if len(body.get("token_ids", body.get("input_ids"))) > 1]
        salts = {body["cache_salt"] for body in fake.bodies}
    assert names[0] == ""
    assert [name.rpartition("-")[0] for name in names[1:]] == ["lora-1", "lora-2"]
    assert salts == {"w0", *names[1:]}, "prefixes are kept apart by the adapter"


async def test_a_running_request_ends_with_what_it_began_with_and_so_do_its_versions(fake, adapter, wait_until):
    fake.token_gate = anyio.Semaphore(0)
    async with engine_of(fake) as engine, anyio.create_task_group() as tasks:
        whole = Held(engine, fake, tasks, "whole")
        await whole.begun()
        async with anyio.create_task_group() as loading:
            loading.start_soon(engine.load_adapter, adapter, 1, SwapMode.RECOMPUTE)
            await wait_until(letting_tokens_through(fake, lambda: fake.label.startswith("lora-1")))
        await wait_until(letting_tokens_through(fake, whole.ended.is_set))
        assert set(versions_of(whole.chunks)) == {0}
        assert len(ids_of(whole.chunks)) == LONG


def letting_tokens_through(fake: FakeServer, happened):
    """Whether something has happened; a token more for whoever waits where not."""

    async def look() -> bool:
        fake.token_gate.release()
        return happened()

    return look


async def test_another_client_of_the_server_asks_for_the_newest_adapter(fake, adapter):
    async with serving(fake) as url:
        settings = HttpEngineSettings(adapters=True)
        async with http_engine(fake.kind, "a", url, settings) as one, http_engine(fake.kind, "b", url, settings) as two:
            await collect(two, ask("before", 2))
            await one.load_adapter(adapter, 5, SwapMode.RECOMPUTE)
            assert set(versions_of(await collect(two, ask("after", 2)))) == {5}
            assert (await two.health()).version == 5


async def test_an_abort_sends_running_requests_on_to_the_new_adapter(fake, adapter, wait_until):
    async with engine_of(fake) as engine, anyio.create_task_group() as tasks:
        fake.token_gate = anyio.Semaphore(0)
        running = Held(engine, fake, tasks, "running")
        await running.begun()
        async with anyio.create_task_group() as loading:
            loading.start_soon(engine.load_adapter, adapter, 1, SwapMode.ABORT)
            await wait_until(letting_tokens_through(fake, running.ended.is_set))
        assert running.chunks[-1].finish_reason is FinishReason.ABORT
        assert set(versions_of(running.chunks)) == {0}
        fake.token_gate = None
        assert set(versions_of(await collect(engine, ask("on", 2)))) == {1}


async def test_a_drain_lets_running_requests_end_and_new_ones_wait_for_the_new_adapter(fake, adapter, wait_until):
    async with engine_of(fake) as engine, anyio.create_task_group() as tasks:
        fake.token_gate = anyio.Semaphore(0)
        running = Held(engine, fake, tasks, "running")
        await running.begun()
        tasks.start_soon(engine.load_adapter, adapter, 1, SwapMode.DRAIN)
        await wait_until(letting_tokens_through(fake, lambda: bool(fake.adapters)))
        waiting = Held(engine, fake, tasks, "waiting")
        await wait_until(letting_tokens_through(fake, waiting.ended.is_set))
        assert running.ended.is_set()
        assert (set(versions_of(running.chunks)), len(ids_of(running.chunks))) == ({0}, LONG)
        assert (set(versions_of(waiting.chunks)), len(ids_of(waiting.chunks))) == ({1}, LONG)


async def test_a_drain_that_takes_too_long_leaves_the_old_adapter_serving(fake, adapter, wait_until):
    async with engine_of(fake, drain_timeout_s=0.2) as engine, anyio.create_task_group() as tasks:
        await engine.load_adapter(adapter, 1, SwapMode.RECOMPUTE)
        fake.token_gate = anyio.Semaphore(0)
        running = Held(engine, fake, tasks, "running", 200)
        await running.begun()
        failed = anyio.Event()

        async def load() -> None:
            with pytest.raises(WeightsRefusedError, match="version 1 serves on"):
                await engine.load_adapter(adapter, 2, SwapMode.DRAIN)
            failed.set()

        tasks.start_soon(load)
        await wait_until(letting_tokens_through(fake, failed.is_set))
        assert list(fake.adapters) == [fake.label]
        on = Held(engine, fake, tasks, "on", 2)
        await wait_until(letting_tokens_through(fake, on.ended.is_set))
        assert set(versions_of(on.chunks)) == {1}
        await engine.abort("running")


async def test_only_as_many_adapters_are_kept_as_the_server_computes_with(fake, adapter):
    async with engine_of(fake) as engine:
        for version in range(1, 7):
            await engine.load_adapter(adapter, version, SwapMode.RECOMPUTE)
            assert len(fake.adapters) <= fake.max_adapters
        assert [name.split("-")[1] for name in fake.adapters] == ["4", "5", "6"]


async def test_an_adapter_stays_while_its_requests_run_and_then_makes_room_by_aborting_them(fake, adapter, wait_until):
    async with engine_of(fake, adapter_wait_s=0.05) as engine, anyio.create_task_group() as tasks:
        await engine.load_adapter(adapter, 1, SwapMode.RECOMPUTE)
        fake.token_gate = anyio.Semaphore(0)
        running = Held(engine, fake, tasks, "running", 200)
        await running.begun()
        kept = []
        for version in (2, 3, 4):
            async with anyio.create_task_group() as loading:
                loading.start_soon(engine.load_adapter, adapter, version, SwapMode.RECOMPUTE)
                labelled = partial(fake_serves, fake, version)
                await wait_until(letting_tokens_through(fake, labelled))
            kept.append(any(name.startswith("lora-1-") for name in fake.adapters))
            if version < 4:
                assert running.chunks[-1].finish_reason is None
        await running.ended.wait()
        assert running.chunks[-1].finish_reason is FinishReason.ABORT
        assert set(versions_of(running.chunks)) == {1}
        assert kept == [True, True, False]


def fake_serves(fake: FakeServer, version: int) -> bool:
    return fake.label.startswith(f"lora-{version}-")


def without_one(tensors):
    return {name: tensor for name, tensor in tensors.items() if not name.endswith("1.mlp.up_proj.lora_B.weight")}


def narrower(tensors):
    name = next(name for name in tensors if name.endswith("lora_A.weight"))
    return tensors | {name: tensors[name][:, :-1].contiguous()}


def for_another_model(tensors):
    return {name.replace("layers.1", "layers.7"): tensor for name, tensor in tensors.items()}


def beside_a_bias(tensors):
    return tensors | {"base_model.model.lm_head.bias": torch.zeros(2)}


@pytest.mark.parametrize(
    ("change", "config", "words"),
    [
        (without_one, {}, "lacks its B matrix"),
        (narrower, {}, "expected the shapes"),
        (for_another_model, {}, "which is no matrix of the model"),
        (beside_a_bias, {}, "no part of a LoRA adapter"),
        (None, {"r": 32}, "--max-lora-rank"),
        (None, {"r": 4}, "expected the shapes"),
        (None, {"use_dora": True}, "use_dora"),
        (None, {"bias": "all"}, "bias"),
    ],
)
async def test_what_does_not_fit_is_refused_before_the_server_is_touched(
    fake, versions, adapter, tmp_path: Path, change, config, words
):
    wrong = write_adapter(tmp_path / "wrong", versions[0], seed=2, change=change, **config)
    async with engine_of(fake) as engine:
        await engine.load_adapter(adapter, 1, SwapMode.RECOMPUTE)
        before = list(fake.calls)
        with pytest.raises(WeightsRefusedError, match=words):
            await engine.load_adapter(wrong, 2, SwapMode.RECOMPUTE)
        assert fake.calls == before
        assert set(versions_of(await collect(engine, ask(n=2)))) == {1}


@pytest.mark.parametrize("damage", ["truncated", "missing", "without config"])
async def test_a_damaged_folder_is_refused_before_the_server_is_touched(fake, versions, tmp_path: Path, damage):
    folder = Path(write_adapter(tmp_path / "damaged", versions[0], seed=2))
    file = folder / "adapter_model.safetensors"
    match damage:
        case "truncated":
            file.write_bytes(file.read_bytes()[:-100])
        case "missing":
            file.unlink()
        case _:
            (folder / "adapter_config.json").unlink()
    async with engine_of(fake) as engine:
        with pytest.raises(WeightsRefusedError, match=str(folder)):
            await engine.load_adapter(str(folder), 1, SwapMode.RECOMPUTE)
        assert not fake.adapters
        assert set(versions_of(await collect(engine, ask(n=2)))) == {0}


async def test_sglang_refuses_matrices_that_it_was_not_started_for(versions, adapter):
    fake = FakeServer(EngineKind.SGLANG, versions[0])
    fake.max_adapters, fake.targets = 3, ["qkv_proj", "o_proj", "gate_up_proj"]
    async with engine_of(fake) as engine:
        with pytest.raises(WeightsRefusedError, match=r"name down_proj in its --lora-target-modules"):
            await engine.load_adapter(adapter, 1, SwapMode.RECOMPUTE)


@pytest.mark.parametrize(
    ("places", "words"), [(0, "--enable-lora"), (1, "2 adapters at once or more, found one for 1")]
)
async def test_a_server_that_was_not_started_for_adapters_is_named(fake, adapter, places, words):
    fake.max_adapters = places
    async with engine_of(fake) as engine:
        with pytest.raises(WeightsRefusedError, match=words):
            await engine.load_adapter(adapter, 1, SwapMode.RECOMPUTE)
        assert not fake.adapters


@pytest.mark.parametrize("failing", ["load", "label", "probe"])
async def test_a_load_that_fails_at_the_server_leaves_the_old_adapter_serving(fake, adapter, failing):
    async with engine_of(fake) as engine:
        await engine.load_adapter(adapter, 1, SwapMode.RECOMPUTE)
        one = dict(fake.adapters)
        match failing:
            case "load":
                prefix = "/v1" if fake.kind is EngineKind.VLLM else ""
                fake.failing_paths[f"{prefix}/load_lora_adapter"] = 500
            case "label":
                fake.failing_paths["/update_weight_version"] = 500
            case _:
                fake.poisoned = {"next"}
        with pytest.raises(WeightsRefusedError, match="version 1 serves on"):
            await engine.load_adapter(adapter, 2, SwapMode.RECOMPUTE)
        assert fake.adapters == one
        assert set(versions_of(await collect(engine, ask(n=2)))) == {1}
        await engine.load_adapter(adapter, 2, SwapMode.RECOMPUTE)
        assert set(versions_of(await collect(engine, ask(n=2)))) == {2}


async def test_a_server_that_goes_away_during_a_load_is_unavailable(fake, adapter):
    async with engine_of(fake) as engine:
        fake.dying_paths = {"/v1/load_lora_adapter", "/load_lora_adapter", "/weight_info", "/model_info"}
        with pytest.raises(EngineUnavailableError):
            await engine.load_adapter(adapter, 1, SwapMode.RECOMPUTE)


async def test_adapters_and_whole_weights_do_not_mix_on_one_server(fake, versions, adapter):
    async with engine_of(fake) as engine:
        await engine.load_adapter(adapter, 1, SwapMode.RECOMPUTE)
        with pytest.raises(WeightsRefusedError, match="start it anew"):
            await engine.load_weights(versions[1], 2, SwapMode.RECOMPUTE)
    fake.label = "3"
    async with engine_of(fake) as engine:
        with pytest.raises(WeightsRefusedError, match="found version 3: start the server anew"):
            await engine.load_adapter(adapter, 4, SwapMode.RECOMPUTE)


def test_the_newest_set_of_adapters_in_vllms_metrics_counts():
    told = 'vllm:lora_requests_info{max_lora="4",running_lora_adapters="%s",waiting_lora_adapters="%s"} %s'
    metrics = "\n".join((told % ("a,b", "c", "1.7960013e+09"), told % ("b", "d", "1.7960014e+09")))
    assert adapters_in_use(metrics.encode()) == {"b", "d"}
    assert adapters_in_use((metrics + "\n" + told % ("", "", "1.7960015e+09")).encode()) == set()
    assert adapters_in_use(b"") == set()
