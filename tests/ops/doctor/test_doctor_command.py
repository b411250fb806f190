"""`headrace doctor` over real files, sockets and servers."""

import fcntl
import json
import socket
from pathlib import Path

import pytest

from broker.embedded import EmbeddedServer
from broker.local_rabbit import LocalRabbit
from ops.cli import main
from ops.doctor.checks import Level
from ops.doctor.examine import examine
from ops.doctor.servers import probe_broker, probe_http

SMOKE = str(Path(__file__).parents[3] / "examples" / "smoke.toml")


@pytest.fixture
def smoke(tmp_path):
    """Findings over the smoke example, in a folder of its own, by check."""

    async def look(*overrides, environ=None):
        found = await examine(SMOKE, [f"run.dir={tmp_path / 'run'}", *overrides], environ or {})
        return {finding.check: finding for finding in found}

    return look


def test_the_smoke_example_is_ready_as_json(tmp_path, capsys):
    code = main(["doctor", SMOKE, "--set", f"run.dir={tmp_path / 'run'}", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert (code, found["passed"]) == (0, True), found
    assert {"cores", "disk", "clock", "python", "packages", "nats-server", "torch", "config", "ports"} <= {
        finding["check"] for finding in found["findings"]
    }
    assert not (tmp_path / "run").exists()


def test_a_misspelt_key_is_shown_with_its_fix_and_exit_code_1(tmp_path, capsys):
    assert main(["doctor", SMOKE, "--set", "run.stepz=3"]) == 1
    assert "did you mean 'steps'" in " ".join(capsys.readouterr().out.split())


async def test_a_taken_port_is_found(smoke):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        found = await smoke(f"gateway.port={taken.getsockname()[1]}")
    assert found["port gateway.port"].level is Level.ERROR


async def test_the_port_of_a_run_that_goes_on_is_no_error(smoke, tmp_path):
    (tmp_path / "run").mkdir()
    with (tmp_path / "run" / "run.lock").open("w+") as lock, socket.create_server(("127.0.0.1", 0)) as taken:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lock.write("4711")
        lock.flush()
        found = await smoke(f"gateway.port={taken.getsockname()[1]}")
    assert "pid 4711" in found["port gateway.port"].found


async def test_credentials_are_named_and_never_printed(smoke, tmp_path):
    token = tmp_path / "token"
    token.write_text("very-secret-value")
    token.chmod(0o644)
    found = await smoke(
        "arena.url=http://127.0.0.1:1",
        "arena.token_env=DOCTOR_TOKEN",
        f"broker.token_file={token}",
        environ={"DOCTOR_TOKEN": "another-secret"},
    )
    assert found["credential arena.token_env"].level is Level.OK
    assert found["credential arena.llm_api_key_env"].level is Level.ERROR
    assert found["credential broker.token_file"].level is Level.WARNING
    assert "secret" not in repr(found)


async def test_a_broker_is_known_by_its_greeting(tmp_path):
    server = EmbeddedServer(tmp_path / "nats")
    await server.start()
    try:
        found = await probe_broker("broker.url", server.url)
        other = await probe_broker("broker.url", server.url.replace("nats://", "amqp://"))
    finally:
        await server.stop()
    assert (found.error, found.version.split(".")[0]) == ("", "2")
    assert other.error == "expected a RabbitMQ, and what listens there is none"
    assert (await probe_broker("broker.url", server.url)).error


@pytest.mark.resources
async def test_a_rabbitmq_is_known_by_its_answer_to_the_protocol_s_header(tmp_path):
    server = LocalRabbit(tmp_path / "rabbit")
    await server.start()
    try:
        found = await probe_broker("broker.url", server.url)
    finally:
        server.kill()
    assert (found.error, found.url, found.version.split(".")[0]) == ("", f"amqp://127.0.0.1:{server.port}", "3")
    assert (await probe_broker("broker.url", server.url)).error


async def test_an_address_with_a_password_is_shown_without_it():
    for found in (
        await probe_broker("broker.url", "nats://user:hidden@127.0.0.1:1"),
        await probe_http("engine.urls", "http://user:hidden@127.0.0.1:1/v1", "/health"),
    ):
        assert found.error
        assert "hidden" not in repr(found)


async def test_what_only_torch_rooms_check_is_told(smoke):
    pytest.importorskip("torch")
    found = await smoke("training.backend=torch", "loss.nonsense=1")
    assert found["config training"].level is Level.ERROR
    assert "nonsense" in found["config training"].found
