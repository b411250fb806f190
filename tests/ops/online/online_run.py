"""A run with online sessions at gateways over one log in memory."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import anyio.lowlevel
import httpx
from gateway_fakes import FakeEngine, House, house

from broker.memory import MemoryBroker, MemoryServer
from ops.online.service import OnlineService
from ops.rollout_adapters import LogRecorder
from pipeline.log import RunLog, RunPayloads
from schemas.config_arena import StreamConfig, StreamRunner
from schemas.messages.rollout import EpisodeEnded
from schemas.messages.sampling import EpisodeRequested
from schemas.topics import EPISODE_ENDED
from stages.ports import ForwardedAnswer

CHAT = "/v1/chat/completions"
STREAM = StreamConfig(
    name="support",
    stream_id="support",
    runner=StreamRunner.ONLINE,
    rows="8",
    claim_deadline_s=60.0,
    reward_deadline_s=30.0,
)


class Peers:
    """Gateways that are alive, reached without a server."""

    def __init__(self) -> None:
        self.alive: dict[str, House] = {}

    async def address(self, gateway: str) -> str | None:
        return gateway if gateway in self.alive else None

    async def forward(self, base_url, target, headers, body):
        async with self.alive[base_url].http() as client:
            response = await client.post(target, content=body, headers=dict(headers))

        async def parts():
            yield response.content

        return ForwardedAnswer(status=response.status_code, headers=list(response.headers.items()), body=parts())


class Clock:
    def __init__(self) -> None:
        self.ahead_s = 0.0

    def __call__(self) -> float:
        return time.time() + self.ahead_s


class Run:
    """A run's log with two gateways."""

    def __init__(self, homes: dict[str, House], services: dict[str, OnlineService], log: RunLog, clock: Clock) -> None:
        self.homes, self.services, self.log, self.clock = homes, services, log, clock
        self.peers = Peers()

    async def ask(self, gateway: str, path: str, body: dict | None = None, key: str = "ctl") -> httpx.Response:
        async with self.homes[gateway].http(key) as client:
            return await client.post(path, json=body or {})

    async def opened(self, gateway: str = "gw-1", **body) -> dict:
        response = await self.ask(gateway, "/v1/sessions", body)
        assert response.status_code == 200, response.text
        return response.json()

    async def chat(self, gateway: str, token: str) -> dict:
        response = await self.ask(gateway, CHAT, {"messages": [{"role": "user", "content": "hi"}]}, token)
        assert response.status_code == 200, response.text
        return response.json()

    async def request(self, *slots: int, group: str = "g0000000", prompt=None, attempt: int = 0) -> None:
        for slot in slots:
            await self.log.publish(
                EpisodeRequested(
                    group=group, slot=slot, attempt=attempt, stream="support", data_id="7", prompt=prompt, min_version=3
                )
            )
        await self.caught_up()

    async def caught_up(self) -> None:
        for service in self.services.values():
            await service._view.catch_up()

    async def sweep(self, gateway: str = "gw-1") -> None:
        await self.services[gateway].sweep(self.homes[gateway].gateway.close_session)
        await self.caught_up()

    async def end(self, slot: int = 0, attempt: int = 0) -> EpisodeEnded | None:
        return await self.log.find(EPISODE_ENDED, "g0000000", slot, attempt)


@asynccontextmanager
async def a_run(*gateways: str) -> AsyncIterator[Run]:
    broker = MemoryBroker(MemoryServer(), "demo")
    log, payloads, clock = RunLog(broker), RunPayloads(broker), Clock()
    homes: dict[str, House] = {}
    services: dict[str, OnlineService] = {}
    run = Run(homes, services, log, clock)
    async with anyio.create_task_group() as tasks:
        for name in gateways:
            service = OnlineService(
                log,
                payloads,
                gateway=name,
                streams={"support": STREAM},
                attempts=2,
                idle_expiry_s=100.0,
                peers=run.peers,
                now=clock,
            )
            services[name] = service
            homes[name] = house(
                FakeEngine(),
                recorder=LogRecorder(log),
                payloads=payloads,
                name=name,
                control_key="ctl",
                online=service,
                peers=run.peers,
            )
            run.peers.alive[name] = homes[name]
            tasks.start_soon(service._view.follow)
        yield run
        tasks.cancel_scope.cancel()
