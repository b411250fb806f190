"""Engines and trainer on the same machines take turns, whatever gets lost or dies."""

from __future__ import annotations

from contextlib import asynccontextmanager

import anyio
import pytest

from broker.memory import MemoryBroker, MemoryServer
from pipeline.turns import TurnGiver, TurnSettings, TurnTaker


class AwayError(Exception):
    """The engine can't be reached."""


class Engine:
    """Counts how often it was put to rest and woken."""

    def __init__(self, name: str = "e") -> None:
        self.name = name
        self.resting = False
        self.history: list[str] = []
        self.fails = 0
        self.lock = anyio.Lock()

    async def rest(self) -> None:
        if self.fails:
            raise AwayError("no answer")
        self.resting = True
        self.history.append("rest")

    async def wake(self) -> None:
        if self.fails:
            self.fails -= 1
            raise AwayError("no answer")
        self.resting = False
        self.history.append("wake")


class Machine:
    """One run's trainer and engines, each with a connection of its own."""

    def __init__(self, **settings: float) -> None:
        self.server = MemoryServer()
        self.settings = TurnSettings(**({"period_s": 0.02, "ttl_s": 60.0, "wait_s": 10.0} | settings))

    def broker(self) -> MemoryBroker:
        return MemoryBroker(self.server, "demo")

    def giver(self, engine: Engine) -> TurnGiver:
        return TurnGiver(
            self.broker(),
            engine.name,
            self.settings,
            rest=engine.rest,
            wake=engine.wake,
            turn=engine.lock,
            errors=(AwayError,),
        )

    def taker(self, generation: int = 1, *, calls: bool = True) -> TurnTaker:
        taker = TurnTaker(self.broker(), self.settings, calls=calls)
        taker.generation = generation
        return taker


@asynccontextmanager
async def running(machine: Machine, *engines: Engine, takers: tuple[TurnTaker, ...] = ()):
    async with anyio.create_task_group() as tasks:
        for engine in engines:
            tasks.start_soon(machine.giver(engine).run)
        for taker in takers:
            await tasks.start(taker.run)
        yield tasks
        tasks.cancel_scope.cancel()


async def test_engines_rest_while_a_step_is_computed_and_go_on_after_it(wait_until) -> None:
    machine, engines = Machine(), (Engine("a"), Engine("b"))
    taker = machine.taker()
    async with running(machine, *engines, takers=(taker,)):
        for step in (1, 2):
            async with taker.take(step) as taken:
                assert (taken.resting, taken.working) == (["a", "b"], [])
                assert all(engine.resting for engine in engines)
            await wait_until(lambda: not any(engine.resting for engine in engines))
    assert engines[0].history == ["rest", "wake", "rest", "wake"]


async def test_an_engine_whose_trainer_died_goes_on_by_itself(wait_until) -> None:
    machine, engine = Machine(ttl_s=0.1), Engine()
    async with running(machine, engine):
        with anyio.move_on_after(10) as life:
            dying = machine.taker()
            async with anyio.create_task_group() as tasks:
                await tasks.start(dying.run)

                async def say_nothing(step: int, *, over: bool) -> None:
                    """It was killed: no call, and no word that the step is over."""

                async with dying.take(1):
                    assert engine.resting
                    dying._call = say_nothing
                    await wait_until(lambda: not engine.resting)
                    life.cancel()
    assert engine.history == ["rest", "wake"]


async def test_a_long_step_is_called_again_and_again(wait_until) -> None:
    machine, engine = Machine(ttl_s=0.2), Engine()
    taker = machine.taker()
    async with running(machine, engine, takers=(taker,)):
        async with taker.take(1):
            calls = machine.broker()
            async with calls.listen("hrw.demo.trainer") as heard:
                for _ in range(6):  # longer than the time to live
                    await anext(heard)
            assert engine.resting
        await wait_until(lambda: not engine.resting)
    assert engine.history == ["rest", "wake"]


async def test_an_engine_that_can_not_rest_is_named_and_the_step_goes_on() -> None:
    machine, engine = Machine(wait_s=0.1), Engine()
    engine.fails = 1
    taker = machine.taker()
    async with running(machine, engine, takers=(taker,)), taker.take(1) as taken:
        assert (taken.resting, taken.working) == ([], ["e"])
        assert taken.waited_s >= 0.1


async def test_an_engine_that_does_not_wake_at_once_is_woken_until_it_does(wait_until) -> None:
    machine, engine = Machine(), Engine()
    taker = machine.taker()
    async with running(machine, engine, takers=(taker,)):
        async with taker.take(1):
            engine.fails = 2
        await wait_until(lambda: not engine.resting)
    assert engine.history == ["rest", "wake"]


async def test_new_weights_wait_until_the_engine_is_awake(wait_until) -> None:
    machine, engine = Machine(), Engine()
    taker = machine.taker()
    loads: list[bool] = []

    async def load() -> None:
        async with engine.lock:
            loads.append(engine.resting)

    async with running(machine, engine, takers=(taker,)) as tasks:
        async with taker.take(1):
            tasks.start_soon(load)
            await anyio.lowlevel.checkpoint()
            assert loads == []
        await wait_until(lambda: loads == [False])


async def test_a_superseded_trainer_puts_nobody_to_rest(wait_until) -> None:
    machine, engine = Machine(wait_s=0.1), Engine()
    old, new = machine.taker(1), machine.taker(2)
    async with running(machine, engine, takers=(old, new)):
        async with new.take(5):
            pass
        await wait_until(lambda: not engine.resting)
        async with old.take(9) as taken:
            assert taken.working == ["e"]
    assert engine.history == ["rest", "wake"]


async def test_every_rank_waits_and_one_speaks(wait_until) -> None:
    machine, engine = Machine(), Engine()
    first, second = machine.taker(), machine.taker(calls=False)
    async with running(machine, engine, takers=(first, second)):
        async with anyio.create_task_group() as tasks:
            found: list[list[str]] = []

            async def rank(taker: TurnTaker) -> None:
                async with taker.take(1) as taken:
                    found.append(taken.resting)
                    await wait_until(lambda: len(found) == 2)

            tasks.start_soon(rank, second)
            tasks.start_soon(rank, first)
        assert found == [["e"], ["e"]]


async def test_an_engine_that_ends_is_awake_and_waited_for_no_more() -> None:
    machine, engine = Machine(), Engine()
    taker = machine.taker()
    async with anyio.create_task_group() as tasks:
        await tasks.start(taker.run)
        async with running(machine, engine), taker.take(1) as taken:
            assert taken.resting == ["e"]
        assert not engine.resting
        async with taker.take(2) as taken:
            assert (taken.resting, taken.working) == ([], [])
        tasks.cancel_scope.cancel()


@pytest.mark.parametrize("step", [1])
async def test_a_run_without_engines_waits_for_nobody(step: int) -> None:
    machine = Machine()
    taker = machine.taker()
    async with running(machine, takers=(taker,)), taker.take(step) as taken:
        assert (taken.resting, taken.working) == ([], [])
        assert taken.waited_s < machine.settings.wait_s
