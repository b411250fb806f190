"""Each way of coming in, against a real server that asks for it."""

from __future__ import annotations

import shutil
import subprocess

import pytest
from nats_servers import nats_server

from broker.connect import connect
from broker.errors import NotConnectedError
from broker.settings import ConnectSettings
from broker.topology import RunLimits

SMALL = RunLimits(log_max_bytes=2**20, payload_max_bytes=2**20, state_max_bytes=2**20)


async def works(url: str, run: str, settings: ConnectSettings) -> bool:
    async with connect(url, run, settings, create=True, limits=SMALL) as broker:
        ref = await broker.payloads.put(b"payload")
        assert await broker.payloads.get(ref) == b"payload"
        return (await broker.publish(f"hr.{run}.a.b.1", b"x")).created


async def test_user_and_password(tmp_path, run):
    (tmp_path / "password").write_text("right\n")
    (tmp_path / "wrong").write_text("not it")
    config = "authorization { users: [{ user: worker, password: right }] }"
    async with nats_server(tmp_path / "s", config) as port:
        url = f"nats://127.0.0.1:{port}"
        assert await works(url, run, ConnectSettings(user="worker", password_file=f"{tmp_path}/password"))
        with pytest.raises(NotConnectedError, match="uthorization") as caught:
            await works(url, run, ConnectSettings(user="worker", password_file=f"{tmp_path}/wrong"))
        assert "not it" not in str(caught.value)


async def test_nkey(tmp_path, run):
    nkeys = pytest.importorskip("nkeys", reason="the package nkeys is not installed")
    seed = nkeys.encode_seed(bytes(range(32)), nkeys.PREFIX_BYTE_USER)
    (tmp_path / "seed").write_bytes(seed)
    public = nkeys.from_seed(bytearray(seed)).public_key.decode()
    async with nats_server(tmp_path / "s", f"authorization {{ users: [{{ nkey: {public} }}] }}") as port:
        assert await works(f"nats://127.0.0.1:{port}", run, ConnectSettings(nkey_seed_file=f"{tmp_path}/seed"))


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the test's certificates")
async def test_tls_with_a_certificate_authority_of_ones_own(tmp_path, run):
    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], check=True, capture_output=True, cwd=tmp_path)

    openssl(
        *[
            "req",
            "-x509",
            "-newkey",
            "ec",
            "-pkeyopt",
            "ec_paramgen_curve:P-256",
            "-nodes",
            "-keyout",
            "key.pem",
            "-out",
            "cert.pem",
            "-days",
            "2",
        ],
        *["-subj", "/CN=broker", "-addext", "subjectAltName=DNS:broker,IP:127.0.0.1"],
    )
    config = f'tls {{ cert_file: "{tmp_path}/cert.pem", key_file: "{tmp_path}/key.pem" }}'
    async with nats_server(tmp_path / "s", config) as port:
        settings = ConnectSettings(tls_ca_file=f"{tmp_path}/cert.pem")
        assert await works(f"tls://127.0.0.1:{port}", run, settings)
        named = ConnectSettings(tls_ca_file=f"{tmp_path}/cert.pem", tls_hostname="broker")
        assert await works(f"tls://localhost:{port}", f"{run}b", named)
        with pytest.raises(NotConnectedError, match="CERTIFICATE_VERIFY_FAILED"):
            await works(f"tls://127.0.0.1:{port}", run, ConnectSettings(connect_deadline_s=2))
