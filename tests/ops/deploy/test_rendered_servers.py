"""The NATS cluster exactly as rendered: three servers on loopback addresses, TLS, users; a run on it, and what a reader may not do."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncGenerator
from pathlib import Path

import anyio
import pytest

from broker.connect import connect, open_admin
from broker.embedded import find_binary
from broker.errors import BrokerError
from broker.settings import ConnectSettings
from ops.deploy.plan import Places
from ops.deploy.render import render, write_all
from ops.nodes.file import load_cluster
from ops.secrets import make_secrets
from ops.topology import declared_topology

ROOT = Path(__file__).parents[3]
HOSTS = ("127.0.0.2", "127.0.0.3", "127.0.0.4")
PASSWORDS = {
    "operator": "o-secret 1",
    "reader": "12e4",
    "rollout": "$x",
}  # with a blank, like a number, like a variable
NODE = '[[nodes]]\nname = "n{n}"\naddress = "{host}"\nbroker = true\n'
SHARES = (
    "control = true\ntrainer = true\narena = true\n",
    "",
    "fan_out = 1\nrewards = 1\nlaunchers = 1\ngateways = 1\n",
)

pytestmark = [pytest.mark.resources, pytest.mark.timeout(240)]


def certificates(folder: Path) -> None:
    """An authority, and one certificate of it for the three addresses."""
    folder.mkdir(parents=True)

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], check=True, capture_output=True, cwd=folder)

    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
    openssl("req", "-x509", *key, "-days", "2", "-subj", "/CN=authority", "-keyout", "ca.key", "-out", "ca.crt")
    names = "subjectAltName=" + ",".join(f"IP:{host}" for host in HOSTS)
    openssl("req", *key, "-subj", "/CN=nats", "-addext", names, "-keyout", "tls.key", "-out", "tls.csr")
    authority = ("-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial")
    openssl("x509", "-req", "-in", "tls.csr", *authority, "-days", "2", "-copy_extensions", "copy", "-out", "tls.crt")


@pytest.fixture
async def rendered(tmp_path: Path) -> AsyncGenerator:
    """The servers, running; the folder with the rendered files."""
    etc, port = tmp_path / "etc", 24222
    nodes = "".join(NODE.format(n=n, host=host) + SHARES[n] for n, host in enumerate(HOSTS))
    (tmp_path / "three.toml").write_text(
        f'config = "{ROOT / "examples" / "smoke.toml"}"\n'
        f"""set = ['run.id="three"', 'run.steps=3', 'broker.max_bytes=100000000', 'broker.max_payload_store_bytes=200000000']\n"""
        f"[broker]\nport = {port}\ncluster_port = {port + 1}\nmax_store_bytes = 2000000000\n{nodes}"
    )
    certificates(etc / "tls")
    (etc / "passwords").mkdir()
    for user, password in PASSWORDS.items():
        (etc / "passwords" / user).write_text(password)
    environment = {f"HEADRACE_THREE_{user.upper()}_PASSWORD": f'"{text}"' for user, text in PASSWORDS.items()}
    servers = []
    for n in range(len(HOSTS)):  # each machine has a state folder of its own
        places = Places(etc=str(etc), state=str(tmp_path / f"state-{n}"))
        write_all(render(load_cluster(tmp_path / "three.toml"), "systemd", places), tmp_path / f"files-{n}")
        with (tmp_path / f"nats-{n}.log").open("wb") as sink:
            command = [str(find_binary()), "-c", str(tmp_path / f"files-{n}" / f"n{n}" / "nats.conf")]
            servers.append(
                await anyio.open_process(command, env={**os.environ, **environment}, stdout=sink, stderr=sink)
            )
    for name in ("topology.toml", "config.toml"):
        (etc / name).write_text((tmp_path / "files-0" / name).read_text())
    yield tmp_path
    for server in servers:
        server.send_signal(signal.SIGKILL)
        await server.wait()


def login(folder: Path, user: str) -> ConnectSettings:
    return ConnectSettings(
        user=user,
        password_file=str(folder / "etc" / "passwords" / user),
        inbox_prefix=f"_INBOX.{user}",
        tls_ca_file=str(folder / "etc" / "tls" / "ca.crt"),
    )


async def test_a_run_goes_through_the_rendered_cluster_with_three_replicas_and_readers_only_read(rendered) -> None:
    topology = str(rendered / "etc" / "topology.toml")
    make_secrets(rendered / "etc" / "secrets.json")
    command = [sys.executable, "-m", "ops", "up", topology, "--json", "--node"]
    async with anyio.create_task_group() as tasks:  # the rollout node logs in as a user with fewer rights
        tasks.start_soon(lambda: anyio.run_process([*command, "n2"], cwd=ROOT))
        done = await anyio.run_process([*command, "n0"], cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr.decode()[-4000:]
    result = json.loads(done.stdout.decode().splitlines()[-1])
    assert (result["steps"], result["unexplained"], result["doubled"], result["dead_letters"]) == (3, 0, 0, 0)

    assert load_cluster(topology).node("n2").broker_user == "rollout"
    url = ",".join(f"tls://{host}:24222" for host in HOSTS)
    async with open_admin(url, login(rendered, "operator")) as admin:
        declared = declared_topology(load_cluster(rendered / "etc" / "topology.toml").config)
        assert declared.log.replicas == 3
        assert await admin.diff(declared) == []
    async with connect(url, "three", login(rendered, "reader")) as broker:
        assert (await broker.log_status()).last_sequence > 100
        with pytest.raises(BrokerError):
            await broker.publish("hr.three.run.control.x", b"no")
    async with connect(url, "three", login(rendered, "rollout")) as broker:
        with pytest.raises(BrokerError):
            await broker.publish("hr.three.step.trained.99.1", b"no")
        with pytest.raises(BrokerError):
            await broker.purge_below(10)
    with pytest.raises(BrokerError):
        async with connect(url, "other", login(rendered, "operator"), create=True):
            pytest.fail("a run's account has no other run's streams")
