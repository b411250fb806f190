"""An engine worker's life, with engines that play scripts and servers that end when told to."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import anyio
import msgspec
import pytest

from broker.memory import MemoryBroker, MemoryServer
from ops.engines.announcing import Announcer, fault
from ops.engines.life import EngineGivenUpError, EngineLife, LifeSettings, RunningServer
from pipeline.metrics import Metrics
from schemas.messages.engines import EngineAnnouncement, EngineState, engines_pattern
from schemas.messages.training import WeightsLoaded
from stages.engine.scripted import ScriptedEngine
from stages.ports import EngineUnavailableError, SwapMode
from stages.weights.receive import STATE_LABEL

FAST = LifeSettings(poll_s=0.005, first_delay_s=0.001, start_timeout_s=5.0, unhealthy_s=0.05, drain_deadline_s=1.0)


class Weights:
    """Loads a version as the receiver would."""

    def __init__(self, house: House, engine: ScriptedEngine, incarnation: str, on_quarantine, on_loaded) -> None:
        self.house, self.engine, self.incarnation = house, engine, incarnation
        self.on_quarantine, self.on_loaded = on_quarantine, on_loaded
        self.refused_version = -1
        house.weights = self

    async def load(self, version: int) -> None:
        await self.engine.load_weights(".", version, SwapMode.DRAIN)
        await self.on_loaded(WeightsLoaded(engine="e", incarnation=self.incarnation, version=version, generation=1))

    async def catch_up(self) -> None:
        await self.house.may_load.wait()
        if self.house.published:
            await self.load(self.house.published)

    async def follow(self) -> None:
        if self.house.swaps_hang:
            with anyio.CancelScope(shield=True):
                await self.house.hung_up[-1].wait()
        await anyio.sleep_forever()


class House:
    """A worker with everything around it."""

    def __init__(self, settings: LifeSettings = FAST, *, attached: bool = False) -> None:
        self.broker = MemoryBroker(MemoryServer(), "demo")
        self.draining = anyio.Event()
        self.may_load = anyio.Event()
        self.may_load.set()
        self.published = 0
        self.engines: list[ScriptedEngine] = []
        self.ends: list[anyio.Event] = []
        self.weights: Weights | None = None
        self.fails_to_start = 0
        self.swaps_hang = False
        self.hung_up: list[anyio.Event] = []
        """By connection: it was closed."""
        self.heard: list[EngineAnnouncement] = []
        first = EngineAnnouncement(name="e", kind="vllm", state=EngineState.STARTING, attached=attached)
        self.metrics = Metrics("demo", "engine")
        self.announcer = Announcer(self.broker, first, self.metrics)
        self.life = EngineLife(
            self.announcer,
            settings,
            start=self.start,
            connect=self.connect,
            make_weights=lambda *given: Weights(self, *given),
            draining=self.draining,
        )

    @asynccontextmanager
    async def start(self) -> AsyncGenerator[RunningServer]:
        if not self.announcer.current.attached or not self.engines:
            self.engines.append(ScriptedEngine(lambda _prompt, _number: [258], keep_calls=True))
        end = anyio.Event()
        self.ends.append(end)
        if len(self.ends) <= self.fails_to_start:
            end.set()

        async def ended() -> str:
            await end.wait()
            return "the server ended with SIGKILL"

        yield RunningServer(url=f"http://127.0.0.1:{len(self.ends)}", ended=ended)

    @asynccontextmanager
    async def connect(self, url: str) -> AsyncGenerator[ScriptedEngine]:
        if self.ends[-1].is_set():
            raise EngineUnavailableError("refused")
        closed = anyio.Event()
        self.hung_up.append(closed)
        yield self.engines[-1]
        closed.set()

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[None]:
        async def listen(*, task_status=anyio.TASK_STATUS_IGNORED) -> None:
            async with self.broker.listen(engines_pattern("demo")) as announcements:
                task_status.started()
                async for _subject, data in announcements:
                    self.heard.append(msgspec.msgpack.decode(data, type=EngineAnnouncement))

        async with anyio.create_task_group() as tasks:
            await tasks.start(listen)
            tasks.start_soon(self.announcer.run)
            tasks.start_soon(self.life.run)
            yield
            tasks.cancel_scope.cancel()

    @property
    def now(self) -> EngineAnnouncement:
        return self.announcer.current

    def states(self) -> list[EngineState]:
        """Announced states, each once in a row."""
        found = [one.state for one in self.heard]
        return [state for at, state in enumerate(found) if at == 0 or found[at - 1] is not state]


async def test_an_engine_serves_after_it_was_warmed_up_and_brought_to_the_current_weights(wait_until) -> None:
    house = House()
    house.published = 7
    house.may_load = anyio.Event()
    async with house.running():
        await wait_until(lambda: house.now.reason == "the current weights")
        assert house.now.state is EngineState.LOADING
        assert [request.request_id[:7] for request in house.engines[0].requests] == ["warm-up"]
        house.may_load.set()
        await wait_until(lambda: house.now.state is EngineState.SERVING)
        await wait_until(lambda: house.heard and house.heard[-1].state is EngineState.SERVING)
    assert house.states() == [EngineState.STARTING, EngineState.LOADING, EngineState.SERVING]
    assert {one.version for one in house.heard if one.state is EngineState.SERVING} == {7}


async def test_a_server_that_dies_is_started_again_and_serves_only_with_the_current_weights(wait_until) -> None:
    house = House()
    async with house.running():
        await wait_until(lambda: house.now.state is EngineState.SERVING)
        before = house.now
        house.published = 9
        house.ends[0].set()
        await wait_until(lambda: len(house.engines) == 2 and house.now.state is EngineState.SERVING)
        await wait_until(
            lambda: (house.heard[-1].incarnation, house.heard[-1].state) == (house.now.incarnation, EngineState.SERVING)
        )
    assert house.now.incarnation != before.incarnation
    assert house.now.num_restarts == 1
    again = [one for one in house.heard if one.incarnation == house.now.incarnation]
    assert {one.version for one in again if one.state is EngineState.SERVING} == {9}
    assert any("SIGKILL" in one.reason for one in house.heard if one.state is EngineState.STARTING)


async def test_an_engine_that_never_starts_is_given_up_with_its_reason() -> None:
    house = House()
    house.fails_to_start = 99
    with (
        anyio.fail_after(10),
        pytest.raises(EngineGivenUpError, match="3 times in a row: the server ended with SIGKILL"),
    ):
        await house.life.run()
    assert house.now.state is EngineState.QUARANTINED


async def test_an_unhealthy_server_is_quarantined_at_once_and_restarted_when_that_lasts(wait_until) -> None:
    house = House(msgspec.structs.replace(FAST, unhealthy_s=30.0))
    async with house.running():
        await wait_until(lambda: house.now.state is EngineState.SERVING)
        house.engines[0].failing = "out of memory"
        await wait_until(lambda: house.now.state is EngineState.QUARANTINED)
        assert house.now.reason == "out of memory"
        house.engines[0].failing = ""
        await wait_until(lambda: house.now.state is EngineState.SERVING)
        assert len(house.engines) == 1
    house = House()
    async with house.running():
        await wait_until(lambda: house.now.state is EngineState.SERVING)
        house.engines[0].failing = "out of memory"
        await wait_until(lambda: len(house.engines) == 2 and house.now.state is EngineState.SERVING)


async def test_a_server_that_hangs_amid_a_swap_is_left_though_swaps_are_shielded(wait_until) -> None:
    house = House()
    house.swaps_hang = True
    async with house.running():
        await wait_until(lambda: house.now.state is EngineState.SERVING)
        house.engines[0].failing = "no answer"
        house.swaps_hang = False
        await wait_until(lambda: len(house.engines) == 2 and house.now.state is EngineState.SERVING)


async def test_half_loaded_weights_quarantine_the_engine_and_a_second_failure_restarts_its_server(wait_until) -> None:
    house = House()
    async with house.running():
        await wait_until(lambda: house.now.state is EngineState.SERVING)
        house.weights.on_quarantine(EngineState.QUARANTINED, "version 3: half loaded")
        assert (house.now.state, house.now.reason) == (EngineState.QUARANTINED, "version 3: half loaded")
        house.weights.on_quarantine(EngineState.SERVING, "")
        await house.weights.load(4)
        assert (house.now.state, house.now.version) == (EngineState.SERVING, 4)
        for _ in range(2):
            house.weights.on_quarantine(EngineState.QUARANTINED, "version 5: half loaded")
        await wait_until(lambda: len(house.engines) == 2 and house.now.state is EngineState.SERVING)


async def test_an_attached_server_that_started_anew_by_itself_is_loaded_again_before_it_serves(wait_until) -> None:
    house = House(attached=True)
    house.published = 5
    async with house.running():
        await wait_until(lambda: house.now.state is EngineState.SERVING)
        before = house.now.incarnation
        house.may_load = anyio.Event()
        house.engines[0].version = 0
        await wait_until(lambda: house.now.state is EngineState.LOADING and house.now.incarnation != before)
        house.may_load.set()
        await wait_until(lambda: house.now.state is EngineState.SERVING)
        assert house.now.version == house.engines[0].version == 5
    serving = [one for one in house.heard if one.state is EngineState.SERVING]
    assert {one.version for one in serving} == {5}


async def test_an_attached_server_that_is_away_is_waited_for(wait_until) -> None:
    house = House(msgspec.structs.replace(FAST, start_timeout_s=0.01), attached=True)
    house.fails_to_start = 0
    async with house.running():
        await wait_until(lambda: house.now.state is EngineState.SERVING)
        assert STATE_LABEL not in house.metrics.labels
        house.engines[0].failing = "refused"
        away = "waiting for the server: refused"
        await wait_until(lambda: house.now.num_restarts == 1 and house.now.reason == away)
        assert house.now.state is EngineState.QUARANTINED
        await wait_until(lambda: house.metrics.labels.get(STATE_LABEL) == away)
        house.engines[0].failing = ""
        await wait_until(lambda: house.now.state is EngineState.SERVING)
        await wait_until(lambda: STATE_LABEL not in house.metrics.labels)
    assert len(house.engines) == 1


async def test_an_attached_server_that_was_left_on_hold_goes_on_when_it_is_there_again(wait_until) -> None:
    house = House(attached=True)
    async with house.running():
        await wait_until(lambda: house.now.state is EngineState.SERVING)
        await house.engines[0].pause()  # as a swap does whose connection was cut
        house.engines[0].failing = "no answer"
        await wait_until(lambda: house.now.num_restarts == 1)
        house.engines[0].failing = ""
        await wait_until(lambda: house.now.state is EngineState.SERVING)


async def test_a_server_that_is_started_again_is_told_with_its_reason_until_it_serves(wait_until) -> None:
    house = House()
    async with house.running():
        await wait_until(lambda: house.now.state is EngineState.SERVING)
        house.may_load = anyio.Event()
        house.ends[0].set()
        await wait_until(lambda: house.now.state is EngineState.LOADING)
        told = {fault(one) for one in house.heard if one.state is EngineState.STARTING and one.num_restarts}
        assert told
        assert all(text.endswith("the server ended with SIGKILL") for text in told)
        assert fault(house.now) == "loading: the current weights"
        house.may_load.set()
        await wait_until(lambda: house.now.state is EngineState.SERVING)
        assert fault(house.now) == ""


async def test_draining_lets_running_requests_end(wait_until) -> None:
    house = House()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(house.life.run)
        await wait_until(lambda: house.now.state is EngineState.SERVING)
        house.engines[0]._running["r"] = False
        house.draining.set()
        await wait_until(lambda: house.now.state is EngineState.DRAINING)
        del house.engines[0]._running["r"]
    assert house.now.reason == "told to end"


async def test_draining_while_a_server_starts_ends_at_once() -> None:
    house = House()
    house.may_load = anyio.Event()
    with anyio.fail_after(5):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(house.life.run)
            await anyio.wait_all_tasks_blocked()
            house.draining.set()
