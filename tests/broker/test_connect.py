from __future__ import annotations

import socket
import sys

import msgspec
import pytest

from broker.api import ConsumerSettings
from broker.connect import connect, open_admin, split_url
from broker.errors import BrokerError, NotConnectedError
from broker.memory import MemoryServer
from broker.settings import ConnectSettings
from schemas.errors import InvalidIdError

QUICK = ConnectSettings(connect_deadline_s=0.5)


@pytest.mark.parametrize(
    ("url", "found"),
    [
        ("http://x", "http://"),
        ("localhost:4222", "no scheme"),
        ("", "nothing"),
        ("nats://a,memory://", "memory://, nats://"),
        ("nats://a,amqp://b", "amqp://, nats://"),
    ],
)
def test_an_unknown_url_is_refused_with_what_was_expected(url, found):
    with pytest.raises(
        BrokerError, match=r"expected nats://host:port, tls://…, amqp://…, amqps://… or memory://"
    ) as caught:
        split_url(url)
    assert found in str(caught.value)


def test_several_urls_are_one_broker():
    assert split_url("amqp://a:1/,amqps://b:2/") == (["amqp://a:1/", "amqps://b:2/"], "amqp")
    assert split_url("nats://a:1, nats://b:2") == (["nats://a:1", "nats://b:2"], "nats")


async def test_memory_brokers_of_one_server_share_their_runs():
    memory = MemoryServer()
    async with connect("memory://", "r", memory=memory) as one, connect("memory://", "r", memory=memory) as two:
        await one.publish("hr.r.a.b.1", b"x")
        assert await two.get("hr.r.a.b.1") is not None
    async with connect("memory://", "r") as alone:
        assert await alone.get("hr.r.a.b.1") is None


async def test_a_memory_broker_has_no_topology():
    with pytest.raises(BrokerError, match="has no topology"):
        async with open_admin("memory://"):
            pass


async def test_a_run_id_that_names_no_stream_is_refused(server):
    for bad in ("a.b", "", "a b", "x" * 65):
        with pytest.raises(InvalidIdError, match="a run id is 1 to 64"):
            async with connect(server.url, bad, server.connect_settings()):
                pass


async def test_no_server_is_one_clear_line_within_the_deadline(run):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"nats://secret-token@127.0.0.1:{free.getsockname()[1]}"
        with pytest.raises(
            NotConnectedError, match=r"expected a NATS server at nats://127\.0\.0\.1.*Connect call failed"
        ) as caught:
            async with connect(url, run, QUICK):
                pass
    assert "secret-token" not in str(caught.value)


async def test_the_second_url_is_used_when_the_first_is_dead(server, run):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        urls = f"nats://127.0.0.1:{free.getsockname()[1]},{server.url}"
        async with connect(urls, run, server.connect_settings(), create=True) as broker:
            assert (await broker.log_status()).connected_url == server.url


async def test_a_wrong_token_is_refused_at_once_and_not_shown(server, run, tmp_path):
    (tmp_path / "token").write_text("wrong-secret")
    with pytest.raises(NotConnectedError, match="uthorization") as caught:
        async with connect(server.url, run, ConnectSettings(token_file=f"{tmp_path}/token")):
            pass
    assert "wrong-secret" not in str(caught.value)


@pytest.mark.parametrize("field", ["token_file", "creds_file", "nkey_seed_file", "tls_ca_file"])
async def test_a_credentials_file_that_is_missing_is_named(server, run, tmp_path, field):
    settings = ConnectSettings(**{field: f"{tmp_path}/missing"})
    with pytest.raises(NotConnectedError, match=f"{tmp_path}/missing"):
        async with connect(server.url, run, settings):
            pass


async def test_an_error_of_the_caller_comes_out_as_itself(server, run):
    async def echo(data: bytes) -> bytes:
        return data

    async def fail() -> None:
        async with (
            connect(server.url, run, server.connect_settings(), create=True) as broker,
            broker.consume("d", [f"hr.{run}.>"], ConsumerSettings()),
            broker.serve(f"hrt.{run}.q", echo),
        ):
            raise KeyError("mine")

    with pytest.raises(KeyError):
        await fail()


async def test_payloads_may_lie_in_a_shared_folder_instead(server, run, tmp_path):
    settings = msgspec.structs.replace(server.connect_settings(), payload_dir=f"{tmp_path}/payloads")
    async with connect(server.url, run, settings, create=True) as broker:
        ref = await broker.payloads.put(b"payload")
        assert await broker.payloads.get(ref) == b"payload"
        assert [path.read_bytes() for path in tmp_path.glob("payloads/*/*")] == [b"payload"]
        assert (await broker.log_status()).payload_bytes == 0


async def test_rabbitmq_without_its_extra_says_what_to_install(run, monkeypatch):
    for name in [name for name in sys.modules if name.startswith(("broker.rabbitmq", "aio_pika"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "aio_pika", None)
    monkeypatch.setitem(sys.modules, "aiormq", None)
    with pytest.raises(BrokerError, match=r"needs the extra `rabbitmq`: pip install 'headrace\[rabbitmq\]'"):
        async with connect("amqp://127.0.0.1:1/", run):
            pass
