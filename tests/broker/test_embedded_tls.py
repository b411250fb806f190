"""Servers of one's own with TLS, from certificates that the test makes."""

from __future__ import annotations

import contextlib
import shutil

import msgspec
import pytest
from certificates import Authority

from broker.connect import connect, open_admin
from broker.embedded import EmbeddedSettings, embedded_server
from broker.errors import BrokerError, NotConnectedError, TooFewServersError
from broker.settings import ConnectSettings
from broker.topology import RunLimits
from ops.engines.server_process import free_port

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the test's certificates")
LIMITS = RunLimits(replicas=3, log_max_bytes=2**26, payload_max_bytes=2**26, state_max_bytes=2**24)


def settings(authority: Authority, name: str, host: str, **more) -> EmbeddedSettings:
    cert, key = authority.sign(name, host)
    tls = {"tls_cert_file": cert, "tls_key_file": key, "tls_ca_file": authority.ca_file}
    return EmbeddedSettings(host=host, server_name=name, **{**tls, **more})


async def test_a_server_with_tls_is_reached_by_its_authority_only(tmp_path, run):
    authority = Authority(tmp_path / "ca")
    async with embedded_server(tmp_path / "s", settings(authority, "one", "127.0.0.1")) as server:
        assert server.url.startswith("tls://127.0.0.1:")
        login = server.connect_settings(ConnectSettings(connect_deadline_s=2.0))
        known = msgspec.structs.replace(login, tls_ca_file=authority.ca_file)
        async with connect(server.url, run, known, create=True) as broker:
            assert (await broker.publish(f"hr.{run}.a.b.1", b"x")).created
        for other in (login, msgspec.structs.replace(login, tls_ca_file=Authority(tmp_path / "other").ca_file)):
            with pytest.raises(NotConnectedError, match="CERTIFICATE_VERIFY_FAILED"):
                async with connect(server.url, run, other):
                    pass


async def test_clients_show_a_certificate_where_they_must(tmp_path, run):
    authority = Authority(tmp_path / "ca")
    strict = settings(authority, "one", "127.0.0.1", tls_verify_clients=True)
    async with embedded_server(tmp_path / "s", strict) as server:
        login = server.connect_settings(ConnectSettings(tls_ca_file=authority.ca_file, connect_deadline_s=2.0))
        with pytest.raises(BrokerError):
            async with connect(server.url, run, login, create=True):
                pass
        cert, key = authority.sign("client", "127.0.0.9")
        shown = msgspec.structs.replace(login, tls_cert_file=cert, tls_key_file=key)
        async with connect(server.url, run, shown, create=True) as broker:
            assert (await broker.publish(f"hr.{run}.a.b.1", b"x")).created


async def test_servers_of_one_authority_are_one_cluster_and_a_stranger_does_not_come_in(tmp_path, run, wait_until):
    authority, hosts = Authority(tmp_path / "ca"), [f"127.0.0.{number}" for number in (2, 3, 4)]
    port, route_port = free_port(hosts[0]), free_port(hosts[0])
    routes = tuple(f"nats://{host}:{route_port}" for host in hosts)
    login = ConnectSettings(tls_ca_file=authority.ca_file, connect_deadline_s=2.0)
    url = ",".join(f"tls://{host}:{port}" for host in hosts)

    def member(signer: Authority, name: str, host: str) -> EmbeddedSettings:
        others = tuple(route for route in routes if f"//{host}:" not in route)
        ports = {"port": port, "route_port": route_port, "routes": others, "max_store_bytes": 2**30}
        return settings(signer, name, host, with_token=False, **ports)

    async def formed() -> bool:
        try:
            async with open_admin(url, login) as admin:
                await admin.runs()
        except BrokerError:
            return False
        return True

    async def made() -> bool:
        try:
            async with connect(url, run, login, create=True, limits=LIMITS) as broker:
                return (await broker.publish(f"hr.{run}.a.b.1", b"x")).created
        except TooFewServersError:  # the third has not been heard of yet
            return False

    async with contextlib.AsyncExitStack() as stack:
        for number, host in enumerate(hosts):
            await stack.enter_async_context(embedded_server(tmp_path / host, member(authority, f"n{number}", host)))
            if number == 1:  # most of the three are there, and not as many as there are copies
                await wait_until(formed, deadline_s=60.0)
                with pytest.raises(TooFewServersError, match="before as many servers are there"):
                    async with connect(url, run, login, create=True, limits=LIMITS):
                        pass
        await wait_until(made, deadline_s=60.0)
        stranger = member(Authority(tmp_path / "other"), "stranger", "127.0.0.5")
        async with embedded_server(tmp_path / "stranger", stranger) as outside:
            log = outside.store / "nats-server.log"
            await wait_until(lambda: "TLS route handshake error" in log.read_text(), deadline_s=30.0)
            with pytest.raises(BrokerError):
                async with connect(outside.url, run, msgspec.structs.replace(login, tls_ca_file=stranger.tls_ca_file)):
                    pass
