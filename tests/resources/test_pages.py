"""Every command that a page shows is typed: by the tutorial's test, here, or by the test that is named for it below.

What takes hours, or a place of one's own, is replaced before it is typed (`typed_as`): a smaller number, a free port, a run's name.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path

import psutil
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "ops" / "reference"))  # importlib mode leaves it alone

from named_commands import named_commands

ROOT = Path(__file__).parents[2]

TYPED = {
    "arena.md", "cluster.md", "durability.md", "howto-compare-losses.md", "log-tools.md", "operating.md", "tutorial.md",
}  # fmt: skip
ELSEWHERE = {
    "headrace run examples/quickstart.toml --set engine.kind=vllm": "tests/loop/test_quickstart_on_servers.py",
    "headrace run examples/quickstart.toml --set broker.url=amqp": "tests/loop/test_rabbitmq_run.py",
    "headrace run examples/quickstart.toml": "tests/loop/test_quickstart.py",
    "headrace run examples/own_agent.toml": "tests/loop/test_own_agent.py",
    "headrace run examples/online_agent.toml": "tests/loop/test_online_agent.py",
    "headrace bridge": "tests/ops/logtools/test_mirror.py",
    "headrace engine": "tests/loop/test_engine_servers.py",
    "headrace worker engine": "tests/loop/test_engine_servers.py",
    "headrace replay q.hrrec --url": "tests/ops/logtools/test_log_commands.py",
    "headrace up examples/cluster.toml --node head": "tests/loop/test_nodes.py",
    "headrace status": "tests/resources/test_tutorial.py",
    "headrace tap": "tests/resources/test_tutorial.py",
    "headrace why": "tests/resources/test_tutorial.py",
}
"""Of pages that are not typed, and of the few that another test runs: how it begins → the test."""
AGENT_RUN = """
[run]
id = "{name}"
dir = "runs/{name}"
steps = 2

[[streams]]
name = "math"
stream_id = "math"
runner = "function"
agent = "examples.own_agent:vowels"

[sampling]
groups_per_step = 1
slots_per_group = 2

[engine]
kind = "scripted"
script = "stages.engine.scripts:random_letters"

[training]
backend = "standin"
"""
UNTIL_TOLD = (
    "headrace arena serve",
    "headrace replay q.hrrec --into",
    "headrace record RUN -o q.hrrec",
    "headrace tap",
)
"""They go on until a signal ends them."""


def commands(page: str) -> list[str]:
    """What the page shows and this file types, from top to bottom."""
    return [
        command
        for where, command in named_commands()
        if where == page and not (page != "cluster.md" and command.startswith("headrace replay q.hrrec --url"))
    ]


@pytest.mark.parametrize(("page", "command"), [one for one in named_commands() if one[0] not in TYPED])
def test_a_command_of_a_page_that_is_not_typed_has_a_test_of_its_own(page: str, command: str) -> None:
    tests = [test for start, test in ELSEWHERE.items() if command.startswith(start)]
    assert tests, f"{page}: {command}"
    assert (ROOT / tests[0]).is_file()


class Desk:
    """A folder with the examples, and a shell."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        shutil.copytree(ROOT / "examples", folder / "examples", ignore=shutil.ignore_patterns("__pycache__"))
        programs = Path(sys.executable).parent
        assert (programs / "headrace").exists(), f"{programs} has no headrace: pip install -e ."
        self.environment = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "COLUMNS": "120"}

    def type(self, command: str, typed_as: Mapping[str, str], *, code: int = 0, told_after_s: float = 0.0) -> str:
        """Run one command; what it said. With `told_after_s` it is interrupted then, and must have gone on until then."""
        for shown, typed in typed_as.items():
            command = command.replace(shown, typed)
        patience = f"timeout --preserve-status -s INT -k 20 {told_after_s} " if told_after_s else ""
        print(f"$ {patience}{command}")  # noqa: T201 - shown when it fails
        variables = re.match(r"((?:[A-Z_]+=\S+ )*)(.*)", command)
        done = subprocess.run(
            ["bash", "-c", f"{variables[1]}{patience}{variables[2]}"],
            cwd=self.folder, env=self.environment, capture_output=True, text=True, check=False,
        )  # fmt: skip
        expected = (0, 130) if told_after_s else (code,)
        assert done.returncode in expected, f"{command}: {done.returncode}\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
        return done.stdout

    def smoke(self, name: str, **changes: str) -> Path:
        """A config of that name like examples/smoke.toml."""
        text = (self.folder / "examples" / "smoke.toml").read_text().replace('"smoke"', f'"{name}"')
        text = text.replace("runs/smoke", f"runs/{name}")
        for shown, typed in changes.items():
            text = re.sub(rf"^{shown} = .*$", f"{shown} = {typed}", text, flags=re.MULTILINE)
        path = self.folder / f"{name}.toml"
        path.write_text(text)
        return path

    @contextmanager
    def beside(self, *command: str, ready: Path | None = None) -> Iterator[subprocess.Popen[str]]:
        """A command that runs meanwhile; it is interrupted in the end."""
        if ready is not None:
            ready.unlink(missing_ok=True)  # of a start before
        with (self.folder / "beside.log").open("a") as log:
            process = subprocess.Popen(
                ["headrace", *command], cwd=self.folder, env=self.environment, stdout=subprocess.PIPE, stderr=log, text=True
            )  # fmt: skip
        try:
            while ready is not None and not ready.exists():
                assert process.poll() is None, (self.folder / "beside.log").read_text()[-3000:]
                time.sleep(0.1)
            yield process
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(30)
            process.stdout.close()


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path)


@pytest.mark.resources
@pytest.mark.timeout(300)
def test_operating(desk: Desk) -> None:
    pytest.importorskip("opentelemetry.sdk")
    for command in commands("operating.md"):
        desk.type(command, {})
    assert (desk.folder / "smoke.html").exists()


@pytest.mark.resources
@pytest.mark.timeout(300)
def test_the_topology_of_a_run(desk: Desk) -> None:
    config = desk.smoke("my", steps="100000")
    with desk.beside("run", str(config), ready=desk.folder / "runs/my/ready.pid"):
        for command in commands("durability.md"):
            if command.startswith("headrace broker"):
                desk.type(command, {})


@pytest.mark.resources
@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_chaos(desk: Desk) -> None:
    fewer = {"--faults 200": "--faults 4", "--faults 20": "--faults 4", "--faults 10": "--faults 2"}
    for command in commands("durability.md"):
        if command.startswith("headrace chaos"):
            desk.type(command, fewer)


@pytest.mark.resources
@pytest.mark.timeout(600)
def test_the_logs_tools(desk: Desk) -> None:
    for name in ("train", "more"):
        rows = [json.dumps({"id": f"{name}-{number}", "prompt": f"a word like {number}"}) for number in range(4)]
        (desk.folder / f"{name}.jsonl").write_text("\n".join(rows))
    (desk.folder / "dataset").mkdir()
    for split in ("train", "test"):
        row = {"id": f"{split}-of-folder", "prompt": f"a word of {split}"}
        (desk.folder / "dataset" / f"{split}-00000-of-00001.jsonl").write_text(json.dumps(row))
    names = {"examples/quickstart.toml": "examples/smoke.toml", "RUN": "runs/smoke"}
    shown = [command for command in commands("log-tools.md") if "publish" not in command]
    published = [command for command in commands("log-tools.md") if "publish" in command]
    desk.smoke("live", steps="100000")
    ready, live = (
        desk.folder / "runs/live/ready.pid",
        [one for one in shown if "tap" in one and "--from-start" not in one],
    )
    (desk.folder / "listed.toml").write_text(AGENT_RUN.format(name="listed"))
    (desk.folder / "closed.toml").write_text(AGENT_RUN.format(name="closed"))
    for name, typed in (("listed", published[:1]), ("closed", published[1:])):
        with desk.beside("run", f"{name}.toml", ready=desk.folder / f"runs/{name}/ready.pid") as run:
            for command in typed:
                desk.type(command, {})
            assert run.wait(120) == 0
    for command in shown:
        ends = not command.startswith(UNTIL_TOLD) or "--until-end" in command or "--from-start" in command
        differs = "--set streams" in command
        with desk.beside("run", "live.toml", ready=ready) if command in live else nullcontext():
            desk.type(command, names, code=1 if differs else 0, told_after_s=0 if ends else 5)
    assert list((desk.folder / "tables").glob("*.parquet"))


@pytest.mark.resources
@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_an_arena(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    for key in ("ARENA_OPENAPI_TOKEN", "ARENA_LLM_API_KEY"):
        desk.environment[key] = "a-key-of-this-test"
    serve, *shown = commands("arena.md")
    with desk.beside(*serve.split()[1:]) as arena:
        url = json.loads(arena.stdout.readline())["url"]
        desk.smoke("run", url=json.dumps(url))
        for command in shown:
            small = {
                "[--json] [--allow-unhealthy]": "--json --allow-unhealthy",
                "--no-training --json": "--no-training --json --set sampling.epoch_size_groups=5",
                "runs/NAME FOLDER": "runs/arena-multi-stream audit",
            }
            desk.type(command, small)
    assert list((desk.folder / "audit").iterdir())


@pytest.mark.resources
@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_two_losses(desk: Desk) -> None:
    desk.smoke("base")
    for command in commands("howto-compare-losses.md"):
        desk.type(command, {})
    assert "seq-mean" in desk.type("headrace status", {})


@pytest.mark.resources
@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_a_cluster(desk: Desk) -> None:
    """Three nodes without torch, on a port that is free."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.2", 0))
        port = probe.getsockname()[1]
    topology = desk.folder / "examples" / "cluster.toml"
    endless = "\"run.steps=100000\", 'training.standin_step_s=0.5', 'run.id"
    text = topology.read_text().replace("quickstart.toml", "smoke.toml").replace("port = 4222", f"port = {port}")
    topology.write_text(text.replace("'run.id", endless))
    deployed_text = topology.read_text().replace('"smoke.toml"', '"examples/smoke.toml"').replace("../runs", "runs")
    elsewhere = "'arena.url=\"http://arena.example:8000\"', 'run.id"  # a job's hosts reach no local Arena
    deployed_text = deployed_text.replace("arena = true\n", "").replace("'run.id", elsewhere)
    (desk.folder / "cluster.toml").write_text(deployed_text)
    try:
        for command in commands("cluster.md"):
            desk.type(command, {})
        for deployed in ("slurm", "systemd", "kubernetes"):
            assert (desk.folder / "deploy" / deployed / "README.md").exists()
    finally:
        left = [one for one in psutil.process_iter() if str(desk.folder) in " ".join(_line(one))]
        alive = psutil.wait_procs(left, timeout=30)[1]
        for process in alive:
            process.kill()
    assert alive == []


def _line(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:
        return []
