"""RabbitMQ behind TLS: its certificate is checked by the settings' authority."""

from __future__ import annotations

import asyncio
import shutil
import ssl
from contextlib import asynccontextmanager

import pytest
from certificates import Authority

from broker.connect import connect
from broker.errors import BrokerError, NotConnectedError
from broker.settings import ConnectSettings

openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the test's certificates")


@asynccontextmanager
async def tls_before(port: int, cert: str, key: str):
    """Takes TLS off what comes in and passes it on."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(cert, key)
    writers = []

    async def pump(reader, writer):
        try:
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        except (ConnectionError, ssl.SSLError):
            pass  # one side is gone
        finally:
            writer.close()

    async def accept(reader, writer):
        inner_reader, inner_writer = await asyncio.open_connection("127.0.0.1", port)
        writers.extend([writer, inner_writer])
        await asyncio.gather(pump(reader, inner_writer), pump(inner_reader, writer))

    listener = await asyncio.start_server(accept, "127.0.0.1", 0, ssl=context)
    try:
        yield listener.sockets[0].getsockname()[1]
    finally:
        listener.close()
        for writer in writers:
            writer.close()


@openssl
@pytest.mark.resources
async def test_a_rabbitmq_with_tls_is_reached_by_its_authority_only(rabbit, rabbit_run, tmp_path, monkeypatch):
    monkeypatch.setattr("broker.rabbitmq.queues.SETTLE_S", 0.0)
    authority = Authority(tmp_path / "ca")
    async with tls_before(rabbit.port, *authority.sign("rabbit", "127.0.0.1")) as port:
        url = f"amqps://guest:guest@127.0.0.1:{port}/"
        known = ConnectSettings(payload_dir=str(tmp_path), tls_ca_file=authority.ca_file, connect_deadline_s=10.0)
        async with connect(url, rabbit_run, known, create=True) as broker:
            assert (await broker.publish(f"hr.{rabbit_run}.a.b.1", b"x")).created
        for authority_file in ("", Authority(tmp_path / "other").ca_file):
            stranger = ConnectSettings(payload_dir=str(tmp_path), tls_ca_file=authority_file, connect_deadline_s=1.0)
            with pytest.raises(NotConnectedError, match="CERTIFICATE_VERIFY_FAILED"):
                async with connect(url, rabbit_run, stranger):
                    pass


@pytest.mark.parametrize("setting", ["token_file", "creds_file", "nkey_seed_file", "tls_hostname"])
async def test_settings_that_rabbitmq_cant_follow_are_refused(setting, tmp_path):
    settings = ConnectSettings(payload_dir=str(tmp_path), **{setting: "x"})
    with pytest.raises(BrokerError, match=f"found {setting}"):
        async with connect("amqp://127.0.0.1:1/", "r", settings):
            pass
