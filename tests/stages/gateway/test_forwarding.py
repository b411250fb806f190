"""Two gateways, two servers: a request at the wrong one is answered by the right one, streams as they come."""

import anyio
import httpx
import pytest
from gateway_fakes import HELLO, FakeEngine, MemoryRecorder, house, served

from stages.clients.forwarding import HttpForwarder, forwarding_client
from stages.gateway.http import GatewayApp
from stages.ports import ForwardedAnswer


class Peers(HttpForwarder):
    """Knows where each gateway is."""

    def __init__(self, client, addresses) -> None:
        super().__init__(client)
        self._addresses = addresses

    async def address(self, gateway):
        return self._addresses.get(gateway)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
async def test_streams_and_bodies_pass_through(path):
    recorder = MemoryRecorder()
    addresses: dict[str, str] = {}
    async with forwarding_client() as client:
        peers = Peers(client, addresses)
        owner = house(FakeEngine(["from the owner"]), recorder=recorder, peers=peers)
        other = house(recorder=recorder, name="gw-2", peers=peers)
        ticket = await owner.gateway.open_session("s")
        async with served(owner) as one, served(other) as two, httpx.AsyncClient(base_url=two) as http:
            addresses |= {"gw-1": one, "gw-2": two}
            headers = {"x-api-key": ticket.token}
            body = await http.post(path, json=HELLO, headers=headers)
            stream = await http.post(path, json=HELLO | {"stream": True}, headers=headers)
            refused = await http.post(path, json={"messages": []}, headers=headers)
    assert "from the owner" in body.text
    assert stream.headers["content-type"].startswith("text/event-stream")
    assert "stop" in stream.text
    assert refused.status_code == 400
    assert other.engine.requests == []
    assert len(recorder.interactions("s")) == 2


async def test_a_gateway_that_cannot_be_reached_is_a_503():
    recorder = MemoryRecorder()
    async with forwarding_client() as client:
        other = house(recorder=recorder, name="gw-2", peers=Peers(client, {"gw-1": "http://127.0.0.1:9"}))
        ticket = await house(recorder=recorder).gateway.open_session("s")
        async with other.http(ticket.token) as http:
            response = await http.post("/v1/chat/completions", json=HELLO)
    assert (response.status_code, response.headers["retry-after"]) == (503, "1")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_ends_its_call_at_the_other_gateway(stream, wait_until):
    recorder = MemoryRecorder()
    engine = FakeEngine(["an answer of many pieces"], gate=anyio.Event())
    addresses: dict[str, str] = {}
    async with forwarding_client() as client:
        peers = Peers(client, addresses)
        owner = house(engine, recorder=recorder, peers=peers)
        other = house(recorder=recorder, name="gw-2", peers=peers)
        ticket = await owner.gateway.open_session("s")
        async with served(owner) as one, served(other) as two, anyio.create_task_group() as tasks:
            addresses |= {"gw-1": one, "gw-2": two}

            async def call():
                async with httpx.AsyncClient(base_url=two, headers={"x-api-key": ticket.token}) as http:
                    await http.post("/v1/chat/completions", json=HELLO | {"stream": stream})

            tasks.start_soon(call)
            await wait_until(lambda: engine.started)
            tasks.cancel_scope.cancel()
            with anyio.CancelScope(shield=True):
                await wait_until(lambda: engine.closed)
    assert recorder.interactions("s") == []


class Breaking:
    """A gateway that dies amid its answer."""

    closed = False

    async def address(self, gateway):
        return f"http://{gateway}"

    async def forward(self, base_url, target, headers, body):
        async def parts():
            try:
                yield b"half"
                raise ConnectionError("it died")
            finally:
                self.closed = True

        return ForwardedAnswer(status=200, headers=[("content-type", "application/json")], body=parts())


async def test_an_answer_that_breaks_off_is_broken_off_for_the_client_too():
    recorder, peers = MemoryRecorder(), Breaking()
    other = house(recorder=recorder, name="gw-2", peers=peers)
    ticket = await house(recorder=recorder).gateway.open_session("s")
    async with served(other) as url, httpx.AsyncClient(base_url=url, headers={"x-api-key": ticket.token}) as http:
        with pytest.raises(httpx.RemoteProtocolError):
            await http.post("/v1/chat/completions", json=HELLO)
    assert peers.closed


async def test_an_answer_begins_once_though_the_other_gateway_breaks_off():
    recorder = MemoryRecorder()
    other = house(recorder=recorder, name="gw-2", peers=Breaking())
    ticket = await house(recorder=recorder).gateway.open_session("s")
    sent: list[str] = []

    async def receive():
        return {"type": "http.request", "body": b"{}", "more_body": False}

    async def send(message):
        sent.append(message["type"])

    headers = [(b"x-api-key", ticket.token.encode())]
    scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "query_string": b"", "headers": headers}
    await GatewayApp(other.gateway)(scope, receive, send)
    assert sent == ["http.response.start", "http.response.body"]
