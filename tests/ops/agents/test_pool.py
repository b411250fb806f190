"""The pool: what agents return, how they fail, and that nothing of it stays behind."""

import math
import os
import subprocess
import sys
from pathlib import Path

import anyio
import psutil
import pytest
from alive import lives
from waiting import wait_until

from ops.agents.process import reward_of
from schemas.errors import ConfigError


async def _gone(pid: int) -> None:
    await wait_until(lambda: not lives(pid), f"the end of process {pid}")


async def _written(file: Path) -> str:
    return await wait_until(lambda: file.exists() and file.read_text(), str(file))


async def test_an_agent_gets_its_task_and_further_arguments_and_gives_a_number(open_agent, play) -> None:
    async with open_agent("echo", args={"bonus": 0.5}) as pool:
        answer = await play(pool, {"reward": 0.25})
    assert (answer.end, answer.reward, answer.rewards) == ("returned", 0.75, {})


async def test_a_map_of_completion_ids_comes_back_as_it_is(open_agent, play) -> None:
    async with open_agent("by_completion") as pool:
        answer = await play(pool, None, session="g0-1")
    assert answer.rewards == {"g0-1-a": 1.0, "g0-1-b": 0.0}


async def test_one_process_plays_several_episodes_at_a_time(open_agent, play) -> None:
    async with open_agent() as pool:
        rewards: list[float] = []

        async def one() -> None:
            rewards.append((await play(pool, {"do": "meet", "count": 8})).reward)

        async with anyio.create_task_group() as tasks:
            for _ in range(8):
                tasks.start_soon(one)
        assert sorted(rewards) == [float(number) for number in range(8)]
        assert len(pool.pids()) == 1


async def test_an_agent_that_raises_fails_its_own_episode_and_its_token_is_not_told(open_agent, play) -> None:
    async with open_agent() as pool:
        answer = await play(pool, {"do": "raise"})
        assert (answer.end, answer.error) == ("failed", "RuntimeError: no luck with ***")
        assert (await play(pool, {"do": "return", "value": 1})).reward == 1.0


@pytest.mark.parametrize("value", [None, "much", [1.0], {}, {"": 1.0}, {"c": None}])
async def test_anything_but_numbers_is_a_failure_that_says_what_was_found(open_agent, play, value) -> None:
    async with open_agent() as pool:
        answer = await play(pool, {"do": "return", "value": value})
    assert answer.end == "failed"
    assert answer.error.startswith("ValueError: expected")


def test_a_reward_that_is_not_finite_is_refused() -> None:
    for value in (math.nan, math.inf, {"c": -math.inf}):
        with pytest.raises(ValueError, match="expected a finite reward"):
            reward_of(value)


async def test_a_dying_process_ends_its_episodes_alone_and_another_takes_its_place(open_agent, play) -> None:
    async with open_agent() as pool:
        ends: list[str] = []

        async def waiting() -> None:
            ends.append((await play(pool, {"do": "wait"})).end)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(waiting)
            await anyio.lowlevel.checkpoint()
            assert (await play(pool, {"do": "die"})).end == "died"
        assert ends == ["died"]
        assert (await play(pool, {"do": "return", "value": 1})).reward == 1.0


async def test_an_episode_that_runs_out_of_time_is_cancelled_and_its_process_lives_on(open_agent, play) -> None:
    async with open_agent() as pool:
        pids = pool.pids()
        assert (await play(pool, {"do": "wait"}, timeout_s=0.05)).end == "timeout"
        assert (await play(pool, {"do": "return", "value": 1})).reward == 1.0
        assert pool.pids()[: len(pids)] == pids


async def test_an_episode_that_nobody_needs_any_more_is_cancelled(open_agent, play) -> None:
    async with open_agent() as pool:
        over = anyio.Event()
        over.set()
        assert (await play(pool, {"do": "wait"}, over=over)).end == "cancelled"


async def test_an_agent_that_blocks_its_process_costs_that_process(open_agent, play, monkeypatch) -> None:
    monkeypatch.setattr("ops.agents.pool.STOP_S", 0.1)
    async with open_agent() as pool:
        assert (await play(pool, {"do": "block"}, timeout_s=0.05)).end == "timeout"
        assert (await play(pool, {"do": "return", "value": 1})).reward == 1.0


async def test_what_an_agent_started_ends_with_its_pool(open_agent, play, tmp_path) -> None:
    file = tmp_path / "pid"
    async with open_agent() as pool, anyio.create_task_group() as tasks:
        tasks.start_soon(play, pool, {"do": "spawn", "file": str(file)})
        await _written(file)
        tasks.cancel_scope.cancel()
    await _gone(int(file.read_text()))


async def test_nothing_survives_a_killed_parent(tmp_path) -> None:
    file = tmp_path / "pid"
    code = (
        "import anyio, os, sys\n"
        "from ops.agents.pool import AgentCall, AgentProgram, open_pool\n"
        "async def main():\n"
        "    async with open_pool(AgentProgram(name='s', agent='example_agents:told', envs=dict(os.environ))) as pool:\n"
        "        call = AgentCall(task={'do': 'spawn', 'file': sys.argv[1]}, base_url='', api_key='', session='s')\n"
        "        await pool.play(call, timeout_s=600, over=anyio.Event())\n"
        "anyio.run(main)\n"
    )
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    with subprocess.Popen([sys.executable, "-c", code, str(file)], env={**os.environ, "PYTHONPATH": path}) as parent:  # noqa: ASYNC220 - a process to kill
        await _written(file)
        children = psutil.Process(parent.pid).children(recursive=True)
        parent.kill()
        for child in children:
            await _gone(child.pid)
    assert int(file.read_text()) in {child.pid for child in children}


@pytest.mark.parametrize(
    ("function", "reason"), [("missing", "AttributeError"), ("no_coroutine", "expected an async function")]
)
async def test_an_agent_that_cannot_be_loaded_is_an_error_that_names_it(open_agent, function, reason) -> None:
    with pytest.raises(BaseExceptionGroup) as raised:
        async with open_agent(function):
            await anyio.sleep_forever()
    (error,) = raised.value.split(ConfigError)[0].exceptions[0].exceptions
    assert f"example_agents:{function}" in str(error)
    assert reason in str(error)
