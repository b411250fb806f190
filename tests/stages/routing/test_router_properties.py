"""Whatever engines and callers do, no slot is lost, no limit is exceeded, nobody waits for ever."""

from __future__ import annotations

from collections.abc import AsyncIterator

import anyio
import anyio.lowlevel
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.messages.engines import EngineAnnouncement, EngineState
from schemas.messages.rollout import FinishReason
from stages.ports import (
    EngineError,
    EngineHealth,
    EngineUnavailableError,
    GenerateRequest,
    SamplingSettings,
    TokenChunk,
)
from stages.routing.router import Router
from stages.routing.settings import RoutingSettings

events = st.lists(
    st.one_of(
        st.tuples(st.just("ask"), st.integers(0, 3), st.integers(0, 2)),
        st.tuples(st.just("cancel"), st.integers(0, 9), st.just(0)),
        st.tuples(st.just("fail"), st.integers(0, 2), st.booleans()),
        st.tuples(st.just("say"), st.integers(0, 2), st.sampled_from(list(EngineState))),
        st.tuples(st.just("restart"), st.integers(0, 2), st.integers(0, 2)),
        st.tuples(st.just("leave"), st.integers(0, 2), st.just(0)),
        st.tuples(st.just("load"), st.integers(0, 2), st.integers(0, 2)),
    ),
    max_size=40,
)


class Engine:
    def __init__(self, version: int) -> None:
        self.version = version
        self.failing = False
        self.running = 0
        self.most = 0

    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            for number in range(3):
                await anyio.lowlevel.checkpoint()
                if self.failing:
                    raise EngineUnavailableError("failing")
                yield TokenChunk(
                    token_ids=np.zeros(1, dtype=np.int32),
                    logprobs=np.zeros(1, dtype=np.float32),
                    version=self.version,
                    finish_reason=FinishReason.LENGTH if number == 2 else None,
                )
        finally:
            self.running -= 1

    async def health(self) -> EngineHealth:
        return EngineHealth(ready=not self.failing, version=self.version, num_running=0, num_waiting=0, max_context=9)


class Play:
    """A router, up to three engines with two slots each, and callers."""

    def __init__(self) -> None:
        self.router = Router(RoutingSettings(wait_deadline_s=0.02, first_quarantine_s=0.001, max_quarantine_s=0.002))
        self.engines: dict[str, Engine] = {}
        self.all: list[Engine] = []
        self.incarnations = 0
        self.scopes: list[anyio.CancelScope] = []
        self.num_ended = 0

    def told(self, name: str, **fields) -> EngineAnnouncement:
        base = {"kind": "vllm", "state": EngineState.SERVING, "capacity": 2, "version": self.engines[name].version}
        return EngineAnnouncement(name=name, incarnation=str(self.incarnations), **{**base, **fields})

    def start(self, name: str, version: int) -> None:
        self.router.leave(name, "it starts anew")
        self.incarnations += 1
        self.engines[name] = Engine(version)
        self.all.append(self.engines[name])
        self.router.join(self.engines[name], self.told(name))

    async def ask(self, session: int, min_version: int) -> None:
        request = GenerateRequest(
            request_id="r",
            prompt_ids=np.zeros(1, dtype=np.int32),
            settings=SamplingSettings(max_new_tokens=3),
            session=f"s{session}",
            min_version=min_version,
        )
        with anyio.CancelScope() as scope:
            self.scopes.append(scope)
            try:
                versions = [chunk.version async for chunk in self.router.generate(request)]
                assert len(versions) == 3
                assert min(versions) >= min_version
            except EngineError:
                pass
        self.num_ended += 1

    def act(self, kind: str, number: int, more) -> None:
        name = f"e{number}"
        match kind:
            case "cancel" if self.scopes:
                self.scopes[number % len(self.scopes)].cancel()
            case "fail" if name in self.engines:
                self.engines[name].failing = more
            case "say" if name in self.engines:
                self.router.hear(self.told(name, state=more))
            case "restart":
                self.start(name, more)
            case "leave":
                self.router.leave(name, "told to")
            case "load" if name in self.engines:
                self.engines[name].version = max(self.engines[name].version, more)
                self.router.hear(self.told(name))
            case _:
                pass


@settings(max_examples=60, deadline=None)
@given(events)
def test_no_slot_is_lost_and_nobody_waits_for_ever(found) -> None:
    async def play() -> None:
        house, asked = Play(), 0
        for name in ("e0", "e1"):
            house.start(name, 0)
        with anyio.fail_after(20):
            async with anyio.create_task_group() as background:
                background.start_soon(house.router.run)
                async with anyio.create_task_group() as callers:
                    for kind, number, more in found:
                        if kind == "ask":
                            asked += 1
                            callers.start_soon(house.ask, number, more)
                        else:
                            house.act(kind, number, more)
                        await anyio.lowlevel.checkpoint()
                background.cancel_scope.cancel()
        assert house.num_ended == asked
        assert all(engine.running == 0 for engine in house.all)
        assert all(engine.most <= 2 for engine in house.all)
        assert all(member.in_flight == 0 for member in house.router.members)
        assert house.router.waits_for() == ""

    anyio.run(play)
