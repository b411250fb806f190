"""Hostile and broken clients: a refusal or a closed connection in time, memory bounded, others undisturbed."""

import contextlib
import resource
import socket
import time

import anyio
import httpx
import msgspec
import pytest
from gateway_fakes import HELLO, FakeEngine, house, served
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stages.gateway.settings import GatewayLimits

PATHS = ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens"]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"null",
        b"[]",
        b"{",
        b"\xff\xfe",
        b'{"messages": [{"role": "user", "content": "\xff"}], "prompt": "\xff", "input": "\xff"}',
        b'{"messages": "no list", "prompt": {}, "input": 3}',
        b'{"messages": [], "prompt": [], "input": []}',
        b'{"messages": [{"role": "alien", "content": "x"}], "prompt": [-1], "input": [{"role": "alien"}]}',
        b'{"messages": [{"role": "user", "content": [{"type": "image"}]}], "prompt": [[1], [2]], "input": [{"role": "user", "content": [{"type": "input_image"}]}]}',
        b"[" * 100_000,
        b'{"messages":' + b'[{"content":' * 50_000,
        b'{"messages": [{"role": "user", "content": "x"}], "prompt": [1], "input": "x", "tools": [{"type": "function", "name": "f", "input_schema": '
        + b'{"a":' * 400 + b"1" + b"}" * 400 + b', "parameters": ' + b'{"a":' * 400 + b"1" + b"}" * 400
        + b', "function": {"name": "f", "parameters": ' + b'{"a":' * 400 + b"1" + b"}" * 400 + b"}}]}",
    ],
    ids=range(13),
)  # fmt: skip
async def test_bodies_that_cannot_be_used_are_4xx(path, body):
    home = house()
    ticket = await home.gateway.open_session("s")
    async with home.http(ticket.token) as client:
        response = await client.post(path, content=body)
    # The one with deep tool schemas is fine for a protocol without tools.
    assert 400 <= response.status_code < 500 or (path == "/v1/completions" and b"tools" in body)
    assert (await home.gateway.close_session("s")).system_error == ""


@pytest.mark.parametrize("path", PATHS)
async def test_ten_thousand_messages_are_refused(path):
    home = house()
    ticket = await home.gateway.open_session("s")
    many = [{"role": "user", "content": "x"}] * 10_000
    async with home.http(ticket.token) as client:
        body = {"messages": many, "input": many, "prompt": [[1]] * 10_000}
        assert (await client.post(path, json=body)).status_code == 400


async def test_a_body_of_100_mb_is_refused_without_being_kept():
    home = house()
    ticket = await home.gateway.open_session("s")
    before_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    headers = {"authorization": f"Bearer {ticket.token}"}

    async def chunked():
        for _ in range(100):
            yield b" " * 1_000_000

    async with served(home) as url, httpx.AsyncClient(base_url=url, headers=headers, timeout=60) as client:
        async with await anyio.connect_tcp("127.0.0.1", int(url.rsplit(":", 1)[1])) as stream:
            await stream.send(
                b"POST /v1/messages HTTP/1.1\r\nhost: x\r\nx-api-key: %b\r\ncontent-length: 100000000\r\n\r\n{"
                % ticket.token.encode()
            )
            assert b" 413 " in (await _closed_within(stream, 10)).splitlines()[0]
        with contextlib.suppress(httpx.TransportError):  # closed while the client was still sending: as good
            assert (await client.post(PATHS[0], content=chunked())).status_code == 413
        assert (await client.post(PATHS[0], json=HELLO)).status_code == 200
    # The limit is 16 MiB a body; the rest is read by nobody.
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kb < 90_000


@pytest.mark.parametrize("element", [b'{"role":"user"}', b'{"role":"user","content":[{"type":""}]}', b"{}", b"[]"])
async def test_a_large_body_of_tiny_pieces_stays_small_in_memory(element):
    home = house()
    ticket = await home.gateway.open_session("s")
    many = b",".join([element] * (15_000_000 // (len(element) + 1)))
    before_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    async with home.http(ticket.token) as client:
        for path, key in (
            ("/v1/chat/completions", b"messages"),
            ("/v1/messages", b"messages"),
            ("/v1/responses", b"input"),
        ):
            response = await client.post(path, content=b'{"%b":[%b]}' % (key, many))
            assert response.status_code == 400
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kb < 100_000


async def _closed_within(reader, seconds) -> bytes:
    data = b""
    with anyio.fail_after(seconds):
        try:
            while True:
                data += await reader.receive()
        except (anyio.EndOfStream, anyio.BrokenResourceError):
            return data


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"POST /v1/messages HTTP/1.1\r\nhost: x\r\n",
        b"POST /v1/messages HTTP/1.1\r\nx-api-key: gen\r\ncontent-length: 50\r\n\r\n{",
    ],
)
async def test_a_client_that_never_ends_its_request_is_cut_off(sent):
    limits = GatewayLimits(header_deadline_s=0.2, body_deadline_s=0.2)
    home = house(limits=limits, generation_keys=("gen",))
    async with served(home) as url:
        port = int(url.rsplit(":", 1)[1])
        async with await anyio.connect_tcp("127.0.0.1", port) as stream:
            await stream.send(sent)
            answer = await _closed_within(stream, 10)
    assert answer == b"" or b" 408 " in answer.splitlines()[0]


async def test_slow_headers_are_cut_off_though_bytes_keep_coming():
    async with served(house(limits=GatewayLimits(header_deadline_s=0.3))) as url:
        port = int(url.rsplit(":", 1)[1])
        async with await anyio.connect_tcp("127.0.0.1", port) as stream, anyio.create_task_group() as tasks:
            await stream.send(b"GET /health HTTP/1.1\r\n")

            async def drip():
                try:
                    while True:
                        await stream.send(b"x-a: b\r\n")
                        await anyio.sleep(0.02)
                except (anyio.BrokenResourceError, anyio.ClosedResourceError):
                    return

            tasks.start_soon(drip)
            await _closed_within(stream, 10)
            tasks.cancel_scope.cancel()


async def test_headers_without_end_are_cut_off():
    async with served(house(limits=GatewayLimits(max_header_bytes=10_000))) as url:
        port = int(url.rsplit(":", 1)[1])
        async with await anyio.connect_tcp("127.0.0.1", port) as stream:
            await stream.send(b"GET /health HTTP/1.1\r\n")
            answer = b""
            try:
                for _ in range(1000):
                    await stream.send(b"x-a: " + b"b" * 1000 + b"\r\n")
            except (anyio.BrokenResourceError, anyio.ClosedResourceError):
                pass
            with contextlib.suppress(anyio.ClosedResourceError):
                answer = await _closed_within(stream, 10)
    assert answer == b"" or b" 431 " in answer.splitlines()[0]


async def test_others_are_served_while_some_are_hostile():
    home = house(FakeEngine(["fine"]), limits=GatewayLimits(header_deadline_s=5))
    ticket = await home.gateway.open_session("s")
    async with served(home) as url:
        port = int(url.rsplit(":", 1)[1])
        idle = [socket.create_connection(("127.0.0.1", port)) for _ in range(100)]
        began = time.monotonic()
        async with httpx.AsyncClient(base_url=url) as client:
            headers = {"authorization": f"Bearer {ticket.token}"}
            assert (await client.post(PATHS[0], json=HELLO, headers=headers)).status_code == 200
        assert time.monotonic() - began < 5
        for one in idle:
            one.close()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.sampled_from(PATHS),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["messages", "role", "content", "type", "text", "tools", "prompt", "input", "name", "function"]), inner, max_size=5),
        max_leaves=20,
    ),
)  # fmt: skip
async def test_no_json_is_a_fault_of_the_gateway(path, value):
    home = house()
    ticket = await home.gateway.open_session("s")
    try:
        body = msgspec.json.encode(value)
    except UnicodeEncodeError:
        return
    async with home.http(ticket.token) as client:
        assert (await client.post(path, content=body)).status_code < 500
