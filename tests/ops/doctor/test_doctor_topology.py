"""`headrace doctor TOPOLOGY`: what is wrong with the nodes of a run, each with a way out."""

from __future__ import annotations

import json
import shutil
import socket
from pathlib import Path

import pytest
from certificates import Authority
from topologies import head, rollout_node

from ops.cli import main
from ops.doctor.certificates import handshake
from ops.doctor.checks import Level
from ops.doctor.cluster import look_at_cluster
from ops.engines.server_process import free_port
from ops.nodes.file import load_cluster
from ops.secrets import make_secrets
from schemas.errors import ConfigError

EXAMPLES = Path(__file__).parents[3] / "examples"
with_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the test's certificates")
NODES = head() + rollout_node(1)


@pytest.fixture
def topology(tmp_path: Path):
    """Write a topology in a folder of its own; its path."""

    def write(nodes: str = NODES, broker: str = "", settings: tuple[str, ...] = (), top: str = "") -> str:
        told = [f"run.dir={tmp_path / 'run'}", *settings]
        port = "" if "port" in broker else f"port = {free_port('127.0.0.2')}"
        (tmp_path / "t.toml").write_text(
            f'config = "{EXAMPLES / "smoke.toml"}"\nset = {json.dumps(told)}\n{top}\n[broker]\n{port}\n{broker}\n{nodes}'
        )
        make_secrets(tmp_path / "secrets.json")
        return str(tmp_path / "t.toml")

    return write


async def found(path: str, environ: dict[str, str] | None = None):
    """Findings by check."""
    findings, _ = await look_at_cluster(load_cluster(path), environ or {})
    for finding in findings:
        assert finding.fix or finding.level in (Level.OK, Level.NOTE), finding
    return {finding.check: finding for finding in findings}


def test_a_topology_that_is_right_passes_by_command_and_no_secret_is_shown(topology, tmp_path, capsys) -> None:
    code = main(["doctor", topology(), "--json"])
    said = capsys.readouterr().out
    assert (code, json.loads(said)["passed"]) == (0, True), said
    by_check = {finding["check"]: finding for finding in json.loads(said)["findings"]}
    assert by_check["nodes"]["found"].startswith("2: control: head; NATS server: head; trainer: head; fan_out: head 1")
    assert by_check["credential secrets"]["level"] == "ok"
    for secret in json.loads((tmp_path / "secrets.json").read_text()).values():
        assert secret not in said
    assert not (tmp_path / "run").exists()


def test_a_topology_that_can_t_be_read_is_one_finding(topology, capsys) -> None:
    assert main(["doctor", topology(NODES.replace("control = true", ""))]) == 1
    assert "control = true on 0 nodes; expected 1" in " ".join(capsys.readouterr().out.split())
    with pytest.raises(ConfigError, match="expected a node of head, rollout-1, found 'gpu'"):
        load_cluster(topology()).node("gpu")


async def test_addresses_that_don_t_resolve_or_mean_another_machine_on_each_are_found(topology) -> None:
    nodes = NODES.replace("127.0.0.3", "no-such-host.invalid")
    assert (await found(topology(nodes)))["address rollout-1"].level is Level.ERROR
    mixed = await found(topology(NODES.replace("127.0.0.3", "192.0.2.7")))
    assert mixed["address head"].level is Level.ERROR
    assert "this machine's own for each machine" in mixed["address head"].found
    assert mixed["address rollout-1"].found == "192.0.2.7: another machine"


async def test_ports_that_are_taken_or_wanted_twice_are_found(topology) -> None:
    with socket.create_server(("127.0.0.2", 0)) as taken:
        port = taken.getsockname()[1]
        look = await found(topology(broker=f"port = {port}"))
    assert look["port [broker] port of head"].level is Level.ERROR
    twice = NODES.replace("127.0.0.3", "127.0.0.2")
    wanted = free_port("127.0.0.2")
    nodes = twice + '[[nodes]]\nname = "g2"\naddress = "127.0.0.2"\ngateways = 1\n'
    look = await found(topology(nodes, settings=(f"gateway.port={wanted}",)))
    assert look[f"port {wanted}"].found == (
        f"127.0.0.2:{wanted} is wanted by gateway.port of rollout-1 and gateway.port of g2"
    )


async def test_more_copies_than_servers_and_servers_on_one_machine_are_found(topology) -> None:
    look = await found(topology(settings=("broker.replicas=3",)))
    assert look["replicas"].level is Level.ERROR
    assert look["replicas"].fix == "set broker.replicas = 1, or broker = true on 3 nodes"
    assert (await found(topology()))["replicas"].level is Level.NOTE
    three = NODES.replace('address = "127.0.0.3"', 'address = "127.0.0.3"\nbroker = true')
    apart = three + '[[nodes]]\nname = "b"\naddress = "127.0.0.4"\nbroker = true\n'
    assert (await found(topology(apart)))["replicas"].found == "3 copies on 3 servers: 1 may be away"
    together = apart.replace("127.0.0.4", "127.0.0.3")
    look = await found(topology(together))
    assert look["replicas"].level is Level.WARNING
    assert any(
        finding.level is Level.ERROR and "is wanted by [broker] port" in finding.found for finding in look.values()
    )


async def test_streams_that_don_t_fit_into_a_server_are_found(topology) -> None:
    look = await found(topology(broker="max_store_bytes = 1000000000"))
    assert look["store"].level is Level.ERROR
    assert look["store"].found.startswith("20.25 GiB for the run's streams of 0.93 GiB")


async def test_keys_of_nodes_must_be_there_and_private(topology, tmp_path) -> None:
    path = topology()
    (tmp_path / "secrets.json").chmod(0o644)
    assert (await found(path))["credential secrets"].level is Level.WARNING
    (tmp_path / "secrets.json").unlink()
    look = await found(path)
    assert look["credential secrets"].level is Level.ERROR
    assert look["credential secrets"].fix.startswith(f"headrace deploy keys {tmp_path}/secrets.json, once")
    users = NODES.replace("launchers = 1", 'launchers = 1\nbroker_user = "rollout"')
    elsewhere = ("broker.url=nats://127.0.0.1:1", f"broker.password_file={tmp_path}/passwords/operator")
    look = await found(topology(users.replace("broker = true", ""), settings=elsewhere))
    assert (
        look["credential broker.password_file of rollout-1"].found
        == f"{tmp_path}/passwords/rollout: not there, or empty"
    )
    assert look["credential broker.password_file of head"].level is Level.ERROR


async def test_gpus_that_ranks_and_engines_take_are_counted(topology) -> None:
    nodes = NODES.replace("trainer = true", "trainer = true\ngpus = 1")
    settings = ("training.ranks=2", "training.backend=torch")
    assert (await found(topology(nodes, settings=settings)))["gpus head"].level is Level.WARNING
    assert "gpus head" not in await found(topology(nodes, settings=("training.backend=torch",)))


async def test_a_checkpoint_folder_that_can_t_be_written_is_found(topology, tmp_path) -> None:
    (tmp_path / "file").write_text("")
    nodes = NODES + "trainer = true\n"
    settings = ("training.ranks=2", "training.backend=torch")
    wrong = topology(nodes, settings=(*settings, f"training.checkpoint_dir={tmp_path}/file/below"))
    assert (await found(wrong))["checkpoints"].level is Level.ERROR
    right = topology(nodes, settings=(*settings, f"training.checkpoint_dir={tmp_path}/below"))
    assert (await found(right))["checkpoints"].level is Level.NOTE


@with_openssl
async def test_certificates_are_tried_as_a_client_would(topology, tmp_path) -> None:
    authority = Authority(tmp_path / "tls")
    authority.sign("head", "127.0.0.2")
    tls = 'tls_cert_file = "tls/{node}.crt"\ntls_key_file = "tls/{node}.key"\ntls_ca_file = "tls/ca.crt"'
    assert (await found(topology(broker=tls)))["certificate head"].level is Level.OK
    authority.sign("head", "127.0.0.9")
    look = await found(topology(broker=tls))
    assert look["certificate head"].level is Level.ERROR
    assert "IP address mismatch" in look["certificate head"].found


@with_openssl
def test_a_handshake_in_memory_tells_what_is_wrong(tmp_path) -> None:
    authority, other = Authority(tmp_path / "ca"), Authority(tmp_path / "other", "other")
    cert, key = authority.sign("one", "127.0.0.2")
    _, wrong_key = authority.sign("two", "127.0.0.2")
    assert handshake(cert, key, authority.ca_file, "127.0.0.2") == ""
    assert "certificate, key or authority can't be used" in handshake(cert, wrong_key, authority.ca_file, "127.0.0.2")
    assert handshake(cert, key, other.ca_file, "127.0.0.2")
    assert handshake(cert, str(tmp_path / "none"), authority.ca_file, "127.0.0.2") == "No such file or directory"
