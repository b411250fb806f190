"""Processes of the local Arena: harness commands, time limits, and that nothing survives."""

import asyncio
import json
import os
import signal
import sys
import tempfile
from pathlib import Path

import psutil
import pytest
from alive import lives
from waiting import wait_until

from ops.arena.config import ArenaServerConfig, HarnessKind, HarnessSpec, StreamSpec
from ops.arena.episodes import EpisodeRunner
from ops.arena.harness import play
from ops.arena.jobs import End, Job, Outcome, TaskTexts
from ops.arena.state import ArenaState, LaunchRequest
from stages.clients.arena.classify import EpisodeFacts, classify

COMMAND = """
kind = "command"
timeout_s = {timeout}
command = ["sh", "-c", {script}]
{rest}
"""


def _command(script: str, timeout: float = 20, rest: str = "") -> str:
    return COMMAND.format(script=json.dumps(script), timeout=timeout, rest=rest)


def _descendants(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)


async def _all_gone(processes: list[psutil.Process]) -> None:
    await wait_until(lambda: not any(lives(one.pid) for one in processes), "the end of what the Arena started")


async def _started(marker: Path) -> None:
    await wait_until(marker.exists, str(marker))


async def test_a_command_gets_the_task_and_the_endpoint_and_its_output_is_scored(start_arena) -> None:
    script = 'echo "$MODEL_NAME $BASE_URL" >&2; test "$OPENAI_BASE_URL" = "$BASE_URL/v1" && test "$ARENA_OPENAPI_TOKEN" = "" && echo $(( $1 ))'
    harness = f'kind = "command"\ncommand = ["sh", "-c", {json.dumps(script)}, "sh", "{{prompt}}"]'
    broken = await start_arena(harness, stream='scorer = "exact"')
    assert (await broken.played())["status"] == "HARNESS_FAILED"
    working = await start_arena(harness.replace("$1", "${1#add }"))
    assert (await working.played())["score"] == 1.0


async def test_a_command_may_leave_its_answer_in_a_file(start_arena) -> None:
    script = "echo noise; printf 7 > answer.txt"
    arena = await start_arena(_command(script, rest='answer_file = "answer.txt"'))
    assert (await arena.played())["raw"]["reply"] == "7"
    empty = await start_arena(_command("echo noise", rest='answer_file = "answer.txt"'))
    assert (await empty.played())["status"] == "NO_OUTPUT"


async def test_a_command_that_is_not_installed_is_a_failed_setup(start_arena) -> None:
    arena = await start_arena('kind = "command"\ncommand = ["no-such-program-here"]')
    result = await arena.played()
    assert result["status"] == "SETUP_FAILED"
    assert "installed" in result["raw"]["error"]


async def test_a_full_disk_at_the_start_is_a_failed_setup_and_never_a_reward_of_zero(monkeypatch) -> None:
    def full(**_options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tempfile, "TemporaryDirectory", full)
    harness = HarnessSpec(key="h", kind=HarnessKind.COMMAND, command=("true",))
    envs = {"MODEL_NAME": "m", "BASE_URL": "http://x", "API_KEY": "k"}
    job = Job(job_id="j", harness=harness, texts=TaskTexts(turns=("q",), answer="a"), max_turns=1, envs=envs)
    outcome = await play(job, None)
    assert (outcome.end, outcome.message) == (End.SETUP_FAILED, "no working folder: No space left on device")
    assert not classify(EpisodeFacts(status="SETUP_FAILED", num_interactions=0)).kept


async def test_an_agent_killed_by_the_clock_behind_a_shell_pipe_is_a_timeout_never_done(start_arena, tmp_path) -> None:
    pids = tmp_path / "pids"
    arena = await start_arena(_command(f"(echo $$ > {pids}; sleep 300) | cat", timeout=0.5))
    result = await arena.played()
    assert (result["status"], result["score"], result["raw"]["exit_reason"]) == ("TIMEOUT", None, "timeout")
    await _all_gone([p for p in _descendants(arena.process.pid) if p.name() in ("sleep", "sh", "cat")])


async def test_partial_work_that_passes_the_verifier_counts_and_keeps_the_reason_timeout(start_arena, chat) -> None:
    chat.answers = ["-4", lambda _request: asyncio.sleep(60)]
    arena = await start_arena('kind = "openai_two_turn"\ntimeout_s = 0.7')
    await arena.register(chat.url)
    result = await arena.played()
    assert (result["status"], result["score"], result["raw"]["exit_reason"]) == ("DONE", 1.0, "timeout")


async def test_a_verifier_that_crashes_is_a_failed_evaluation_and_never_a_score() -> None:
    class BrokenVerifier:
        def __getitem__(self, _idx: int) -> dict[str, object]:
            return {"question": "q", "answer": "a", "metadata": {}}

        def score_answer(self, _answer: str | None, _entry: dict[str, object]) -> float:
            raise OSError(28, "No space left on device")

    class Pool:
        async def play(self, job) -> Outcome:
            return Outcome(job_id=job.job_id, end=End.OK, reply="a")

    harness = HarnessSpec(key="h", kind=HarnessKind.SCRIPTED)
    stream = StreamSpec(stream_id="s", dataset="chain_sum", size=2, harness="h@1")
    state = ArenaState(ArenaServerConfig(streams=(stream,), harnesses=(harness,)))
    state.sources["s"]._dataset = BrokenVerifier()
    request = LaunchRequest(data_id=state.sources["s"].data_ids[0], model_name="m", base_url="http://x", api_key="k")
    task = state.add("s", request, harness)
    await EpisodeRunner(state, Pool()).run(task, None)
    assert (task.status, task.score, task.raw["exit_reason"]) == ("EVAL_FAILED", None, "grading_error")


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
async def test_nothing_survives_an_arena_however_it_ends(start_process, tmp_path, how) -> None:
    marker = tmp_path / "started"
    script = f"(setsid sh -c 'touch {marker}; sleep 300' &) ; sleep 300"
    arena = await start_process(_command(script))
    await arena.launch()
    await _started(marker)

    def both_sleep() -> list[psutil.Process]:
        found = _descendants(arena.process.pid)
        return found if sum(one.name() == "sleep" for one in found) >= 2 else []

    family = await wait_until(both_sleep)
    arena.process.send_signal(how)
    async with asyncio.timeout(10):
        code = await arena.process.wait()
    assert code == (0 if how != signal.SIGKILL else -signal.SIGKILL)
    await _all_gone(family)


async def test_nothing_survives_the_death_of_the_arenas_parent(tmp_path) -> None:
    code = "import subprocess,sys,time\np=subprocess.Popen([sys.executable,'-m','ops.arena','quickstart'],stdout=subprocess.PIPE)\nsys.stdout.write(p.stdout.readline().decode())\nsys.stdout.flush()\ntime.sleep(300)"
    envs = {**os.environ, "ARENA_OPENAPI_TOKEN": "t", "ARENA_LLM_API_KEY": "k"}
    parent = await asyncio.create_subprocess_exec(sys.executable, "-c", code, env=envs, stdout=asyncio.subprocess.PIPE)
    ready = json.loads(await parent.stdout.readline())
    family = [psutil.Process(ready["pid"]), *_descendants(ready["pid"])]
    parent.kill()
    await parent.communicate()
    await _all_gone(family)


async def test_two_arenas_on_one_machine_never_collide(start_arena) -> None:
    first, second = await start_arena(), await start_arena()
    assert first.url != second.url
    assert (await first.played())["score"] == (await second.played())["score"] == 1.0


async def test_a_harness_process_that_dies_fails_its_episodes_and_is_started_again(
    start_arena, commands, tmp_path
) -> None:
    marker = tmp_path / "started"
    arena = await start_arena(_command(f"touch {marker}; sleep 300"))
    task_id = await arena.launch()
    await _started(marker)
    (worker,) = [one for one, line in commands(arena.process.children()) if "harness_process" in line]
    worker.kill()
    result = await arena.finished(task_id)
    assert (result["status"], result["raw"]["error"]["message"]) == ("HARNESS_FAILED", "the harness process died")
    marker.unlink()
    await arena.launch(number=1)
    await _started(marker)


@pytest.mark.parametrize(("text", "told"), [
    ("streams = 3", "streams"),
    ('host = "0.0.0.0"', "loopback"),
    ("unknown_key = 1", "unknown_key"),
    ('faults_file = "/nowhere/plan.toml"', "faults_file"),
])  # fmt: skip
async def test_a_bad_config_is_one_clear_line_and_exit_code_1(tmp_path, text, told) -> None:
    good = 'streams = [{stream_id="s",dataset="chain_sum",size=2,harness="h@1"}]\nharnesses = [{key="h",kind="scripted"}]\n'
    path = tmp_path / "arena.toml"
    path.write_text(text if text.startswith("streams") else good + text)
    envs = {**os.environ, "ARENA_OPENAPI_TOKEN": "t", "ARENA_LLM_API_KEY": "k"}
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "ops.arena",
        str(path),
        env=envs,
        stderr=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    out, err = await process.communicate()
    assert (process.returncode, out) == (1, b"")
    assert len(err.decode().splitlines()) == 1
    assert told in err.decode()


async def test_missing_credentials_are_named() -> None:
    envs = {name: value for name, value in os.environ.items() if not name.startswith("ARENA_")}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "ops.arena", "quickstart", env=envs, stderr=asyncio.subprocess.PIPE
    )
    _, err = await process.communicate()
    assert process.returncode == 1
    assert "ARENA_OPENAPI_TOKEN" in err.decode()
