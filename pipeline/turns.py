"""Whose turn it is on machines that hold engines and the trainer: the trainer asks, engines rest for as long as it says so.

    trainer ──call, again every ttl/4──▶ engines: rest ──resting──▶ trainer trains ──over──▶ engines: wake
                     └── nothing for ttl_s: the trainer died, or is out of sight ──▶ engines: wake

All of it travels on core subjects: a message that is lost is said again, and after `ttl_s` of silence nobody rests. A
trainer waits for the engines it has heard of for `wait_s` at the most, then trains beside those that did not rest.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Final

import anyio
import anyio.abc
import msgspec
import structlog

from broker.api import Broker
from broker.errors import BrokerError
from schemas.ids import encode_token

log = structlog.get_logger("headrace.turns")

_PREFIX: Final = "hrw"


class TurnCall(msgspec.Struct, frozen=True, kw_only=True):
    """The trainer says that a step is being computed, or that it is over."""

    generation: int
    step: int
    ttl_s: float
    over: bool = False


class TurnAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """An engine says whether it rests: every second, and at once when that changes."""

    engine: str
    resting: bool
    step: int = 0
    """Of the call that it rests for."""
    problem: str = ""
    """Why it could not rest."""
    leaving: bool = False
    """It ends, and is not to be waited for."""


class TurnTaken(msgspec.Struct, frozen=True, kw_only=True):
    """What a trainer got."""

    waited_s: float
    resting: list[str]
    working: list[str]
    """Engines that did not rest in time."""


class TurnSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How patient both sides are."""

    ttl_s: float = 10.0
    """Engines rest for so long after a call; calls come four times as often."""
    wait_s: float = 20.0
    """How long a trainer waits for engines to rest."""
    period_s: float = 1.0
    """Between two announcements of an engine. One that was not heard for five of them has left."""


class TurnTaker:
    """The trainer's side. Every rank waits; one that `calls` speaks for all."""

    def __init__(self, broker: Broker, settings: TurnSettings, *, calls: bool = True) -> None:
        self._broker: Final = broker
        self._settings: Final = settings
        self._calls: Final = calls
        self._heard: Final[dict[str, tuple[TurnAnswer, float]]] = {}
        self._news = anyio.Event()
        self._since_s = 0.0
        self._step: int | None = None
        """The step that is being computed."""
        self.generation = 0
        """Of this trainer's lease."""

    async def run(self, *, task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Hear engines, and go on calling while a step is computed; for ever."""
        async with anyio.create_task_group() as tasks:
            await tasks.start(self._listen)
            task_status.started()
            while True:
                if self._step is not None:
                    await self._call(self._step, over=False)
                await anyio.sleep(self._settings.ttl_s / 4)

    async def _listen(self, *, task_status: anyio.abc.TaskStatus[None]) -> None:
        async with self._broker.listen(f"{_PREFIX}.{self._broker.run}.engine.*") as announcements:
            self._since_s = anyio.current_time()
            task_status.started()
            async for _subject, data in announcements:
                answer = msgspec.msgpack.decode(data, type=TurnAnswer)
                if answer.leaving:
                    self._heard.pop(answer.engine, None)
                else:
                    self._heard[answer.engine] = (answer, anyio.current_time())
                self._news.set()
                self._news = anyio.Event()
                if self._step is not None and answer.step != self._step:  # it came late, or the call was lost
                    await self._call(self._step, over=False)

    @asynccontextmanager
    async def take(self, step: int) -> AsyncGenerator[TurnTaken]:
        """Train inside the block: engines rest, as far as they do. `run` must be running."""
        try:
            self._step = step
            await self._call(step, over=False)
            yield await self._wait(step)
        finally:
            self._step = None
            with anyio.CancelScope(shield=True):
                await self._call(step, over=True)

    async def _wait(self, step: int) -> TurnTaken:
        started_s = anyio.current_time()
        # Whoever has listened for too short a time to have heard all engines listens on first.
        settled_s = self._since_s + 2 * self._settings.period_s
        with anyio.move_on_after(self._settings.wait_s):
            while self._working(step) or anyio.current_time() < settled_s:
                with anyio.move_on_after(max(self._settings.period_s, settled_s - anyio.current_time())):
                    await self._news.wait()
        working = self._working(step)
        if working:
            log.warning(
                "a step is computed beside engines that do not rest", step=step, engines=working, why=self._problems()
            )
        return TurnTaken(
            waited_s=anyio.current_time() - started_s,
            resting=sorted(set(self._present()) - set(working)),
            working=working,
        )

    def _present(self) -> dict[str, TurnAnswer]:
        oldest_s = anyio.current_time() - 5 * self._settings.period_s
        return {name: answer for name, (answer, heard_s) in self._heard.items() if heard_s >= oldest_s}

    def _working(self, step: int) -> list[str]:
        return sorted(n for n, answer in self._present().items() if not (answer.resting and answer.step == step))

    def _problems(self) -> dict[str, str]:
        return {name: answer.problem for name, answer in self._present().items() if answer.problem}

    async def _call(self, step: int, *, over: bool) -> None:
        if not self._calls:
            return
        call = TurnCall(generation=self.generation, step=step, ttl_s=self._settings.ttl_s, over=over)
        try:
            await self._broker.announce(f"{_PREFIX}.{self._broker.run}.trainer", msgspec.msgpack.encode(call))
        except BrokerError as error:  # said again, or engines wake by themselves
            log.warning("engines could not be told whose turn it is", step=step, over=over, error=str(error))


class TurnGiver:
    """An engine's side."""

    def __init__(
        self,
        broker: Broker,
        engine: str,
        settings: TurnSettings,
        *,
        rest: Callable[[], Awaitable[None]],
        wake: Callable[[], Awaitable[None]],
        turn: anyio.Lock,
        errors: tuple[type[Exception], ...],
    ) -> None:
        """Args:
        turn: held while the engine rests, and by whoever must not find it resting (new weights, probes).
        errors: what `rest` and `wake` raise when the engine is away.
        """
        self._broker: Final = broker
        self._engine: Final = engine
        self._settings: Final = settings
        self._rest: Final = rest
        self._wake: Final = wake
        self._turn: Final = turn
        self._errors: Final = errors
        self._generation = 0
        self._step = 0
        self._until_s = 0.0
        self._heard = anyio.Event()
        self._problem = ""
        self.resting = False

    async def run(self) -> None:
        """Give way whenever the trainer asks, for ever; awake when it ends."""
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._listen)
                tasks.start_soon(self._announce_on)
                await self._act()
        finally:
            with anyio.CancelScope(shield=True):
                await self._announce(leaving=True)

    async def _listen(self) -> None:
        async with self._broker.listen(f"{_PREFIX}.{self._broker.run}.trainer") as announcements:
            async for _subject, data in announcements:
                self._hear(msgspec.msgpack.decode(data, type=TurnCall))

    def _hear(self, call: TurnCall) -> None:
        if call.generation < self._generation or (call.over and call.step < self._step):
            return  # of a trainer that was superseded, or late
        self._generation, self._step = call.generation, call.step
        self._until_s = 0.0 if call.over else anyio.current_time() + call.ttl_s
        self._heard.set()
        self._heard = anyio.Event()

    async def _act(self) -> None:
        while True:
            await self._until_asked()
            async with self._turn:
                if self._asked() and await self._go_to_rest():
                    try:
                        await self._until_over()
                    finally:
                        with anyio.CancelScope(shield=True):
                            await self._wake_up()
            if self._problem:
                await self._heard.wait()  # the next call is the next try

    def _asked(self) -> bool:
        return anyio.current_time() < self._until_s

    async def _until_asked(self) -> None:
        while not self._asked():
            await self._heard.wait()

    async def _until_over(self) -> None:
        rested_for = self._step
        while self._asked():
            if self._step != rested_for:  # the next step follows at once
                rested_for = self._step
                await self._announce()
            with anyio.move_on_after(max(0.0, self._until_s - anyio.current_time())) as silence:
                await self._heard.wait()
            if silence.cancelled_caught and not self._asked():
                log.warning("the trainer was not heard any more: the engine goes on", engine=self._engine)

    async def _go_to_rest(self) -> bool:
        try:
            await self._rest()
        except self._errors as error:
            self._problem = str(error)
            log.warning("the engine does not rest", engine=self._engine, error=str(error))
        else:
            self._problem, self.resting = "", True
        await self._announce()
        return self.resting

    async def _wake_up(self) -> None:
        delay_s = 0.1
        while self.resting:
            try:
                await self._wake()
                self.resting = False
            except self._errors as error:
                log.warning("the engine does not wake up: tried again", engine=self._engine, error=str(error))
                await anyio.sleep(delay_s)
                delay_s = min(5.0, 2 * delay_s)
        await self._announce()

    async def _announce_on(self) -> None:
        while True:
            await self._announce()
            await anyio.sleep(self._settings.period_s)

    async def _announce(self, *, leaving: bool = False) -> None:
        answer = TurnAnswer(
            engine=self._engine, resting=self.resting, step=self._step, problem=self._problem, leaving=leaving
        )
        subject = f"{_PREFIX}.{self._broker.run}.engine.{encode_token(self._engine)}"
        try:
            await self._broker.announce(subject, msgspec.msgpack.encode(answer))
        except BrokerError as error:
            log.debug("an engine could not say whether it rests", error=str(error))
