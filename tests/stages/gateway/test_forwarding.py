"""Two gateways, two servers: a request at the wrong one is answered by the right one, streams as they come."""

import httpx
import pytest
from gateway_fakes import FakeEngine, MemoryRecorder, house, served

from stages.clients.forwarding import HttpForwarder, forwarding_client

HELLO = {"messages": [{"role": "user", "content": "hi"}]}


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
