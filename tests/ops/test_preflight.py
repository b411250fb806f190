"""`headrace preflight`: a whole config against its local Arena, for scripts and for machines."""

import json

import pytest

from ops.cli import main

CONFIG = """
[run]
id = "p"
[[streams]]
name = "sums"
stream_id = "sums"
task_envs = {{ A_KEY = "marked-value" }}
{stream}
[local_arena]
pool_processes = 1
[[local_arena.streams]]
stream_id = "sums"
dataset = "chain_sum"
dataset_options = {{ min_terms = 2, max_terms = 2 }}
size = 5
harness = "loop@1"
[[local_arena.harnesses]]
key = "loop"
kind = "openai_loop"
"""


@pytest.fixture
def config(tmp_path):
    def write(stream: str = "") -> str:
        path = tmp_path / "run.toml"
        path.write_text(CONFIG.format(stream=stream))
        return str(path)

    return write


def test_a_good_config_passes_and_proves_the_model_gateways_key(config, capsys) -> None:
    assert main(["preflight", config(), "--allow-unhealthy", "--json"]) == 0
    out = capsys.readouterr().out
    report = json.loads(out)
    assert report["passed"] is True
    assert (report["streams"][0]["num_rows"], report["streams"][0]["env_names"], report["problems"]) == (
        5,
        ["A_KEY"],
        [],
    )
    assert "marked-value" not in out


def test_health_stops_a_run_unless_it_is_waived(config, capsys) -> None:
    assert main(["preflight", config()]) == 1
    out = capsys.readouterr().out
    assert "health: stream 'sums': 0 of its last 100 tasks ended" in out
    assert "--allow-unhealthy passes over health" in " ".join(out.split())
    assert "marked-value" not in out


def test_what_is_wrong_with_a_stream_is_never_waived(config, capsys) -> None:
    assert main(["preflight", config('harness = "loop@7"'), "--allow-unhealthy", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["passed"] is False
    assert "loop" in report["streams"][0]["problems"][0]["text"]


def test_servers_that_do_not_answer_stop_a_run(config, capsys) -> None:
    servers = ["--set", "engine.kind=vllm", "--set", 'engine.urls=["http://127.0.0.1:9"]']
    assert main(["preflight", config(), "--allow-unhealthy", *servers]) == 1
    assert "server engine.urls: http://127.0.0.1:9" in capsys.readouterr().out
