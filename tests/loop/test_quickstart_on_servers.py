"""The first run with its real policy and trainer on real vLLM and SGLang servers (CPU); only engine.kind changes."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil
import pytest

from ops.engines.cpu_environment import CpuEnvironmentError, cpu_environment
from ops.engines.listening import heard_engines
from pipeline.log import RunLog
from schemas.messages.engines import EngineState
from schemas.topics import STEP_TRAINED

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart.toml"

pytestmark = pytest.mark.resources


@pytest.fixture(autouse=True)
def environment() -> None:
    """The servers' environment: missing, the tests are skipped on a laptop and fail in continuous integration."""
    try:
        cpu_environment()
    except CpuEnvironmentError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(error))


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kind", ["vllm", "sglang"])
async def test_the_first_run_learns_on_a_server(headrace, kind: str) -> None:
    async with headrace("--steps", "15", "--set", f"engine.kind={kind}", config=QUICKSTART) as run:
        result = await run.result()
    rewards = result["reward_by_step"]
    assert len(rewards) == 15
    assert sum(rewards[-3:]) / 3 - sum(rewards[:3]) / 3 >= 0.2
    assert (result["unexplained"], result["doubled"], result["dead_letters"]) == (0, 0, 0)
    assert result["staleness"]["max"] <= result["staleness"]["bound"]
    assert result["groups"]["trained"] == 15 * 8


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", ["vllm", "sglang"])
async def test_a_real_server_is_killed_while_a_policy_is_trained_on_two(
    headrace, wait_until, commands, kind: str
) -> None:
    more = ("--set", f"engine.kind={kind}", "--set", "engine.count=2", "--steps", "100000")
    async with headrace(*more, config=QUICKSTART) as run:
        await run.wait_for_step(2, deadline_s=900.0)
        async with run.broker() as broker:

            async def serving() -> dict[str, str]:
                heard = await heard_engines(broker, listen_s=1.2)
                return {one.name: one.incarnation for one in heard if one.state is EngineState.SERVING}

            async def both_serve() -> bool:
                return len(await serving()) == 2

            await wait_until(both_serve, deadline_s=600.0)
            before = await serving()
            worker = run.children()["engine-0"]
            servers = [one for one, line in commands(worker.children(recursive=True)) if "leash.py" not in line]
            servers[0].send_signal(signal.SIGKILL)

            async def replaced() -> bool:
                now = await serving()
                return len(now) == 2 and now["engine-0"] != before["engine-0"]

            await wait_until(replaced, deadline_s=900.0)
            async with RunLog(broker).read([STEP_TRAINED], follow=False) as entries:
                step = max([entry.message.step async for entry in entries])
        await run.wait_for_step(step + 3, deadline_s=300.0)
        family = psutil.Process(run.process.pid).children(recursive=True)
        run.interrupt()
        assert await run.process.wait() == 130
    assert b'"unexplained":0' in run.stdout
    assert b'"doubled":0' in run.stdout
    assert not psutil.wait_procs(family, timeout=20)[1]
