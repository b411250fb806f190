"""A real vLLM or SGLang server killed with 32 requests in flight. Long: two servers are started."""

from __future__ import annotations

import os
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path

import anyio
import anyio.to_thread
import numpy as np
import psutil
import pytest

from ops.engines.cpu_environment import CpuEnvironmentError, cpu_environment
from schemas.config import EngineKind
from schemas.messages.engines import EngineAnnouncement, EngineState
from stages.clients.engines import HttpEngineSettings, http_engine
from stages.gateway.generation import Sampled, sample
from stages.gateway.settings import GatewayLimits
from stages.ports import GenerateRequest, SamplingSettings, SwapMode
from stages.routing.router import Router
from stages.routing.settings import RoutingSettings

pytestmark = [pytest.mark.resources, pytest.mark.nightly, pytest.mark.timeout(1500)]

sys.path.insert(0, str(Path(__file__).parents[2] / "stages" / "clients" / "engines"))

NUM_REQUESTS = 32
NUM_TOKENS = 160


@pytest.fixture(autouse=True)
def environment() -> None:
    try:
        cpu_environment()
    except CpuEnvironmentError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(error))


def two_servers(stack: ExitStack, kind: EngineKind, versions: list[str], folder: Path) -> list[str]:
    """Two servers of the first version, started side by side."""
    from real_servers import real_server  # noqa: PLC0415 - torch, only here

    # Their leashes end with the threads that started them: the pool outlives the servers.
    pool = stack.enter_context(ThreadPoolExecutor(2))
    started = [
        pool.submit(stack.enter_context, real_server(kind, versions[0], folder / f"{number}.log"))
        for number in range(2)
    ]
    return [one.result() for one in started]


def kill_server(url: str, commands) -> None:
    """SIGKILL to the process that was started with this port, as the kernel's memory killer would."""
    port = url.rsplit(":", 1)[1]
    for process, line in commands(psutil.Process().children(recursive=True)):
        if "leash.py" not in line and f" --port {port} " in f"{line} ":
            process.send_signal(signal.SIGKILL)
            return
    raise AssertionError(f"no server at {url}")


@pytest.mark.parametrize("kind", [EngineKind.VLLM, EngineKind.SGLANG])
async def test_a_real_server_is_killed_with_32_requests_in_flight(
    kind: EngineKind, tmp_path: Path, wait_until, commands
) -> None:
    from real_servers import make_versions  # noqa: PLC0415 - torch, only here

    versions = make_versions(tmp_path / "versions")
    answers: dict[int, Sampled] = {}
    begun: set[int] = set()
    router = Router(RoutingSettings(wait_deadline_s=300.0))

    async def ask(number: int) -> None:
        async def on_ids(_ids: object) -> None:
            begun.add(number)

        request = GenerateRequest(
            request_id=f"r{number}",
            prompt_ids=np.array([number + 1, 2, 3], dtype=np.int32),
            settings=SamplingSettings(max_new_tokens=NUM_TOKENS),
            session=f"s{number}",
        )
        answers[number] = await sample(router, request, limits=GatewayLimits(), context_length=256, on_ids=on_ids)

    with ExitStack() as servers:
        dying, living = await anyio.to_thread.run_sync(two_servers, servers, kind, versions, tmp_path)
        async with AsyncExitStack() as stack, anyio.create_task_group() as tasks:
            settings = HttpEngineSettings(model_folder=versions[0])
            a = await stack.enter_async_context(http_engine(kind, "a", dying, settings))
            b = await stack.enter_async_context(http_engine(kind, "b", living, settings))
            await b.load_weights(versions[1], 1, SwapMode.RECOMPUTE)
            tasks.start_soon(router.run)
            told = {"kind": kind.value, "state": EngineState.SERVING, "capacity": NUM_REQUESTS, "incarnation": "1"}
            router.join(a, EngineAnnouncement(name="a", version=0, **told))
            async with anyio.create_task_group() as asking:
                for number in range(NUM_REQUESTS):
                    asking.start_soon(ask, number)
                await wait_until(lambda: len(begun) >= 4, deadline_s=600.0)
                assert router.members[0].in_flight == NUM_REQUESTS
                router.join(b, EngineAnnouncement(name="b", version=1, **told))
                kill_server(dying, commands)
            tasks.cancel_scope.cancel()
    assert len(answers) == NUM_REQUESTS
    resumed = 0
    for answer in answers.values():
        assert answer.num == NUM_TOKENS
        assert not answer.fault
        assert [version for version, _ in answer.versions] in ([0, 1], [1])
        resumed += len(answer.versions) == 2
    assert resumed >= 4
