"""Reported faults of configs and of operating, again through the command that people type."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import sys
from pathlib import Path

import anyio
import msgspec
import psutil
import pytest

from ops.arena.config import EpisodeFault, FaultPlan
from ops.arena.quickstart import quickstart_config
from schemas.ids import group_id
from schemas.messages.sampling import GroupClosed
from schemas.topics import GROUP_CLOSED

ROOT = Path(__file__).parents[2]
FAMILY = ROOT / "tests" / "ops" / "engines" / "fake_server_family.py"

# verl-project/verl#559


@pytest.mark.parametrize(
    ("groups_per_step", "mini_batch_groups", "named"),
    [(10, 4, b"mini_batch_groups = 4 does not divide sampling.groups_per_step = 10"), (8, 16, b"16")],
)
async def test_verl_559_sizes_that_do_not_divide_are_refused_with_both_numbers(
    headrace, groups_per_step, mini_batch_groups, named
) -> None:
    sizes = (f"sampling.groups_per_step={groups_per_step}", f"assembly.mini_batch_groups={mini_batch_groups}")
    async with headrace("--set", sizes[0], "--set", sizes[1]) as run:
        assert await run.process.wait() == 1
        assert named in run.stderr
        assert str(groups_per_step).encode() in run.stderr
        assert run.children() == {}


# backbay-labs/clawdstrike#107


@pytest.mark.parametrize("name", ["run.7", "run 7", "run*", "rün"])
async def test_clawdstrike_107_a_run_id_that_can_not_be_a_subject_token_is_refused_by_name(headrace, name) -> None:
    async with headrace("--set", f'run.id="{name}"') as run:
        assert await run.process.wait() == 1
        assert b"run.id" in run.stderr
        assert b"Traceback" not in run.stderr


# NVIDIA-NeMo/RL#3248


@pytest.mark.nightly
async def test_nemo_rl_3248_steps_and_epochs_both_bound_a_run_also_after_a_resume(headrace, tmp_path) -> None:
    bounds = ("--set", "run.epochs=2", "--set", "sampling.epoch_size_groups=12", "--set", "training.standin_step_s=0.3")
    async with headrace("--steps", "4", *bounds) as run:
        assert (await run.result())["steps"] == 4
    async with headrace("--steps", "10", *bounds, folder=tmp_path / "run") as run:
        result = await run.result()
    assert result["steps"] == 6
    assert result["groups"]["trained"] == 24
    assert (result["unexplained"], result["doubled"]) == (0, 0)


# nats-io/nats.py#373


async def test_nats_py_373_a_run_that_waits_for_prompts_ends_at_the_first_signal(headrace, wait_until) -> None:
    opened = ("--set", "streams.vowels.open=true", "--set", 'streams.vowels.rows=""')
    async with headrace(*opened, config=ROOT / "examples" / "own_agent.toml") as run:
        await run.wait_for_endpoints()
        await wait_until(lambda: len(run.children()) >= 3, deadline_s=60)
        run.interrupt()
        assert await run.process.wait() == 130
        assert run.children() == {}


# PrimeIntellect-ai/prime-rl#2158: launcher -> engine worker -> server -> two children that ignore SIGTERM


@pytest.fixture
def labelled(commands):
    """Every living process with a label in its command line, whoever its parent is."""

    def found(label: Path, words: str = "") -> list[psutil.Process]:
        return [one for one, line in commands(psutil.process_iter()) if str(label) in line and words in line]

    return found


def ports_of(processes: list[psutil.Process]) -> set[int]:
    """Where they listen."""
    return {
        connection.laddr.port
        for process in processes
        for connection in process.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    }


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


@pytest.mark.nightly
@pytest.mark.timeout(300)
async def test_prime_rl_2158_whoever_is_ended_how_ever_takes_its_whole_tree_along(
    headrace, with_servers, tmp_path, wait_until, labelled
) -> None:
    stubborn = ("--set", f"engine.command={json.dumps([sys.executable, str(FAMILY), str(tmp_path)])}")
    arguments = (*with_servers, "--set", "engine.count=1", *stubborn, "--set", "training.standin_step_s=0.3")
    steps = 0
    for ended, code in ((signal.SIGTERM, 130), (signal.SIGKILL, -9)):
        async with headrace("--steps", "1000", *arguments) as run:  # the second start works at once
            await run.wait_for_step(steps + 2, deadline_s=120.0)
            children = labelled(tmp_path, "signal.SIG_IGN")
            assert len(children) == 2
            run.children()["engine-0"].kill()
            await wait_until(lambda two=children: not any(one in labelled(tmp_path) for one in two), deadline_s=15)
            steps += 4
            await run.wait_for_step(steps, deadline_s=120.0)  # another one was started
            tree = labelled(tmp_path)
            ports = ports_of(tree)
            assert len(ports) >= 4  # of the broker, the Arena, the gateway, the server
            os.kill(run.process.pid, ended)
            assert await run.process.wait() == code
            await wait_until(lambda: not labelled(tmp_path), deadline_s=15)
            assert [port for port in ports if not is_free(port)] == []
    async with headrace("--steps", str(steps + 2), *arguments) as run:
        result = await run.result()
    assert (result["unexplained"], result["doubled"]) == (0, 0)
    assert result["steps"] == steps + 2


@pytest.mark.nightly
async def test_prime_rl_2158_a_stage_that_does_not_close_keeps_no_other_from_closing(
    headrace, tmp_path, wait_until, labelled
) -> None:
    async with headrace("--steps", "1000", "--set", "training.standin_step_s=0.3") as run:
        await run.wait_for_step(1)
        run.children()["gateway"].suspend()
        run.process.terminate()
        assert await run.process.wait() == 130
        await wait_until(lambda: not labelled(tmp_path), deadline_s=15)
    async with headrace("--steps", "3") as run:
        assert (await run.result())["unexplained"] == 0


# PrimeIntellect-ai/prime-rl#3015


def failing_arena(tmp_path: Path, *, skip: int, limit: int | None) -> tuple[str, ...]:
    """Arguments of a run of small steps whose Arena gets no sandbox for any task from one on."""
    no_sandbox = EpisodeFault(kind="status", status="SETUP_FAILED", run_harness=False, skip=skip, limit=limit)
    faults = FaultPlan(episodes=(no_sandbox,))
    file = tmp_path / "arena.json"
    file.write_bytes(msgspec.json.encode(msgspec.structs.replace(quickstart_config(), faults=faults)))
    settings = (
        f"arena.local_config={file}", "rollout.attempts=1",
        "sampling.groups_per_step=1", "sampling.slots_per_group=2",
        "assembly.stall.rounds=10", "assembly.stall.seconds=0.5",
    )  # fmt: skip
    return tuple(argument for setting in settings for argument in ("--set", setting))


@pytest.mark.timeout(180)
async def test_prime_rl_3015_an_arena_without_sandboxes_from_step_3_on_ends_the_run_with_the_reason(
    headrace, tmp_path
) -> None:
    async with headrace("--steps", "1000", *failing_arena(tmp_path, skip=6, limit=None)) as run:
        assert await run.process.wait() == 1
        assert run.children() == {}
    said = " ".join(run.stderr.decode().split())
    assert re.search(r"too_few_usable: \d+", said)
    command = [sys.executable, "-m", "ops", "report", str(run.folder.path), "--json"]
    done = await anyio.run_process(command, cwd=ROOT)
    account = json.loads(done.stdout)["account"]
    assert 1 <= account["steps"] <= 3
    assert 10 <= account["groups"]["dropped"] < 200  # as many as the 0.5 s let through
    assert account["unexplained"] == 0


@pytest.mark.timeout(180)
async def test_prime_rl_3015_dead_groups_between_good_ones_end_nothing(headrace, tmp_path) -> None:
    async with headrace("--steps", "8", *failing_arena(tmp_path, skip=6, limit=14)) as run:
        result = await run.result()
    assert result["steps"] == 8
    assert result["groups"]["dropped"] >= 7
    assert result["unexplained"] == 0


@pytest.mark.timeout(180)
async def test_prime_rl_3015_an_error_in_the_midst_of_a_stage_ends_its_process_and_is_the_runs_last_word(
    headrace,
) -> None:
    async with headrace("--steps", "1000", "--set", "run.max_restarts=0") as run:
        await run.wait_for_step(1)
        async with run.broker() as broker:
            for ordinal in range(40, 60):  # somebody else's words stand where assembly is about to say its own
                closed = GroupClosed(group=group_id(ordinal), stream="x", usable=False, reason="not by this run")
                await broker.publish(GROUP_CLOSED.subject(broker.run, closed), GROUP_CLOSED.encode(closed))
        assert await run.process.wait() == 1
        assert run.children() == {}
    said = " ".join(run.stderr.decode().split())
    assert "with other bytes" in said
    assert "exit code" in said
