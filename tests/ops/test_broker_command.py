"""`headrace broker` against a real server with TLS and a login."""

from __future__ import annotations

import asyncio
import json
import subprocess
from pathlib import Path

import msgspec
import pytest
from nats_servers import port_of

from broker.connect import connect
from broker.embedded import find_binary
from broker.settings import ConnectSettings
from ops.cli import main
from ops.config import load_config
from ops.doctor.topology import check_topology
from ops.topology import consumer_settings, declared_topology, limits_of

STREAMS = ["stream HR_r", "stream HRS_r", "stream HRP_r"]
DURABLES = [f"durable {name}" for name in ("fan_out", "arena_launch", "map_rewards", "broadcast_weights")]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a server's certificate and a config that names it."""
    folder = tmp_path_factory.mktemp("broker")
    request = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -keyout key.pem -out cert.pem"
    subprocess.run(
        ["openssl", *request.split(), "-subj", "/CN=broker", "-addext", "subjectAltName=IP:127.0.0.1"],
        check=True,
        capture_output=True,
        cwd=folder,
    )
    (folder / "password").write_text("correct horse")
    (folder / "server.conf").write_text(
        f'listen: "127.0.0.1:-1"\nports_file_dir: "{folder}"\njetstream {{ store_dir: "{folder}" }}\n'
        f'tls {{ cert_file: "{folder}/cert.pem", key_file: "{folder}/key.pem" }}\n'
        'authorization { users: [{ user: admin, password: "correct horse" }] }\n'
    )
    server = subprocess.Popen([find_binary(), "-c", folder / "server.conf", "-l", folder / "log"])
    asyncio.run(write_config(folder, server))
    yield folder
    server.terminate()
    server.wait()


async def write_config(folder: Path, server: subprocess.Popen[bytes]) -> None:
    port = await port_of(server, folder)
    (folder / "run.toml").write_text(f"""
[run]
id = "r"
dir = "{folder}/run"
[[streams]]
name = "s"
stream_id = "s"
[broker]
url = "tls://127.0.0.1:{port},tls://127.0.0.1:1"
user = "admin"
password_file = "{folder}/password"
tls_ca_file = "{folder}/cert.pem"
max_bytes = 1048576
max_payload_store_bytes = 2097152
""")


@pytest.fixture
def command(place, capsys):
    def call(name: str, *arguments: str) -> tuple[int, dict]:
        code = main(["broker", name, str(place / "run.toml"), "--json", *arguments])
        return code, json.loads(capsys.readouterr().out)

    return call


def test_apply_makes_what_is_declared_and_verify_and_diff_tell_what_differs(command, place, capsys):
    code, told = command("diff")
    assert (code, told["differences"]) == (1, [f"{what}: missing" for what in (*STREAMS, *DURABLES)])
    code, told = command("apply")
    assert (code, told["applied"]) == (0, True)
    assert [(change["what"], change["done"]) for change in told["changes"]] == [
        (what, "created") for what in (*STREAMS, *DURABLES)
    ]
    assert command("diff") == (0, {"run": "r", "differences": []})
    assert command("verify") == (0, {"run": "r", "verified": True, "differences": []})

    larger = ("--set", "broker.max_bytes=2097152")
    line = "stream HR_r: max_bytes: expected 2097152, found 1048576"
    assert command("verify", *larger) == (1, {"run": "r", "verified": False, "differences": [line]})
    code, told = command("apply", *larger)
    assert (code, told["applied"]) == (1, False)
    assert line in told["error"]
    code, told = command("apply", "--update", *larger)
    assert [change["done"] for change in told["changes"]] == ["changed", *["unchanged"] * 6]
    assert command("verify", *larger)[0] == 0

    assert main(["broker", "show", str(place / "run.toml")]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["durables"][1]["ack_wait_s"] == 8.0


async def test_the_doctor_and_a_worker_tell_a_durable_with_other_settings(place):
    config = load_config(place / "run.toml", ['run.id="other"'])
    login = ConnectSettings(user="admin", password_file=str(place / "password"), tls_ca_file=str(place / "cert.pem"))
    assert "made when the run starts" in (await check_topology(config))[0].found
    declared = declared_topology(config)
    async with connect(config.broker.url, "other", login, create=True, limits=limits_of(config)) as broker:
        foreign = msgspec.structs.replace(consumer_settings("fan_out", config), ack_wait_s=77.0)
        async with broker.consume("fan_out", declared.durables[0].filters, foreign):
            pass
        findings = await check_topology(config)
        assert [finding.found for finding in findings] == ["durable fan_out: ack_wait_s: expected 10.0, found 77.0"]
        assert "headrace broker apply CONFIG --update" in findings[0].fix


def test_all_launchers_together_may_have_more_in_their_hands_than_one(place):
    config = load_config(place / "run.toml", ["rollout.max_concurrent_episodes=6000"])
    launch = consumer_settings("arena_launch", config)
    assert (launch.prefetch, launch.max_ack_pending) == (6000, 64 * 6000)
    assert consumer_settings("arena_launch", load_config(place / "run.toml")).max_ack_pending >= 4096


def test_secrets_are_in_no_output(place, capsys):
    main(["broker", "show", str(place / "run.toml")])
    main(["broker", "diff", str(place / "run.toml")])
    (place / "wrong").write_text("a wrong secret")
    with pytest.raises(SystemExit):
        main(["broker", "diff", str(place / "run.toml"), "--set", f"broker.password_file={place}/wrong"])
    out = capsys.readouterr()
    assert "uthorization" in out.err
    assert "correct horse" not in out.out + out.err
    assert "a wrong secret" not in out.out + out.err
