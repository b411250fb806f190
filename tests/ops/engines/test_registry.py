"""Servers that a person adds: asked for, refused with a reason, kept over restarts."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest

from broker.memory import MemoryBroker, MemoryServer
from ops.config import decode_config
from ops.engines.registry import EngineRequest, EngineRequestError, ask_registry, registered
from ops.nodes.share import whole
from ops.run_folder import RunFolder
from ops.running.engines import kept_engines
from ops.supervise.process import ProcessSpec
from ops.supervise.supervisor import Supervisor


class Recorder(Supervisor):
    """Starts nothing; remembers what it was asked."""

    def __init__(self) -> None:
        self.specs: dict[str, ProcessSpec] = {}
        self.given_up: dict[str, object] = {}
        self.reason = ""

    async def start(self, spec, *, on_ready=None, on_given_up=None):
        self.specs[spec.name] = spec
        self.given_up[spec.name] = on_given_up

    async def end(self, name: str) -> bool:
        return self.specs.pop(name, None) is not None

    def fail(self, reason: str) -> None:
        self.reason = reason


def config(**engine):
    streams = [{"name": "words", "stream_id": "words", "sampling_weight": 1.0}]
    return decode_config({"run": {"id": "demo"}, "streams": streams, "arena": {"url": "local"}, "engine": engine})


@asynccontextmanager
async def engines(broker: MemoryBroker, tmp_path: Path, **engine) -> AsyncGenerator[Recorder]:
    supervisor = Recorder()
    loaded = config(**engine)
    async with kept_engines(loaded, whole(loaded), RunFolder(tmp_path), {}, supervisor, broker):
        yield supervisor


async def ask(broker: MemoryBroker, action: str, **fields) -> str:
    with anyio.fail_after(10):
        return await ask_registry(broker, EngineRequest(action=action, **fields))


async def test_an_added_server_gets_a_worker_and_is_there_again_after_a_restart(tmp_path: Path) -> None:
    broker = MemoryBroker(MemoryServer(), "demo")
    async with engines(broker, tmp_path, kind="vllm") as supervisor:
        assert list(supervisor.specs) == ["engine-0"]
        assert await ask(broker, "register", url="http://gpu-7:8000/", kind="sglang") == "gpu-7-8000"
        assert supervisor.specs["gpu-7-8000"].argv[-6:-2] == ["--kind", "sglang", "--url", "http://gpu-7:8000"]
    async with engines(broker, tmp_path, kind="vllm") as supervisor:
        assert list(supervisor.specs) == ["engine-0", "gpu-7-8000"]
        assert await ask(broker, "deregister", name="gpu-7-8000") == "gpu-7-8000"
        assert list(supervisor.specs) == ["engine-0"]
    assert await registered(broker) == []


async def test_what_can_not_be_done_is_refused_with_what_to_do(tmp_path: Path) -> None:
    broker = MemoryBroker(MemoryServer(), "demo")
    async with engines(broker, tmp_path, kind="vllm"):
        for action, fields, words in (
            ("register", {"url": "gpu-7:8000"}, "expected http://host:port"),
            ("register", {"url": "http://h:1", "name": "a b"}, "expected letters, digits"),
            ("register", {"url": "http://h:1", "name": "engine-0"}, "is in the run; give another --name"),
            ("register", {"url": "http://h:1", "kind": "builtin"}, "--kind vllm or sglang"),
            ("deregister", {"name": "engine-0"}, "it comes from the config"),
            ("deregister", {"name": "gone"}, "no such engine; this run looks after engine-0"),
        ):
            with pytest.raises(EngineRequestError, match=words):
                await ask(broker, action, **fields)


async def test_a_run_whose_last_engine_is_given_up_ends(tmp_path: Path) -> None:
    broker = MemoryBroker(MemoryServer(), "demo")
    async with engines(broker, tmp_path, kind="vllm", count=2) as supervisor:
        supervisor.given_up["engine-1"]("engine-1 failed to start 3 times in a row: out of memory")
        assert not supervisor.reason
        supervisor.given_up["engine-0"]("engine-0 failed to start 3 times in a row: out of memory")
        assert supervisor.reason.startswith("no engine is left. engine-0 failed to start 3 times")
