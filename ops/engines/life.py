"""The life of one engine: start its server, warm it up, bring it to the current weights, serve, watch, start it again.

    starting ──healthy──▶ loading ──current weights──▶ serving ──drain──▶ draining ──▶ end
       ▲                                                  │
       └── backoff ◀── ended, or unhealthy for too long ◀─┤
                                                          └── unhealthy: quarantined ──well again──▶ serving

A server that was there before (attached) is never started or stopped: it is waited for. Until one that failed serves again,
its announcements tell why.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, contextmanager
from typing import Final, Protocol

import anyio
import msgspec
import numpy as np
import structlog

from ops.engines.announcing import Announcer
from schemas.messages.engines import EngineState
from schemas.messages.training import WeightsLoaded
from stages.ports import EngineError, EngineHealth, GenerateRequest, InferenceEngine, SamplingSettings

log = structlog.get_logger("headrace.engine")


class LifeSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How patient the worker is."""

    start_timeout_s: float = 600.0
    max_failed_starts: int = 3
    poll_s: float = 1.0
    """Between two looks at the server."""
    health_deadline_s: float = 5.0
    unhealthy_s: float = 15.0
    """A server that did not say that it is well for so long is started again."""
    warm_up_deadline_s: float = 120.0
    first_delay_s: float = 0.5
    max_delay_s: float = 30.0
    drain_deadline_s: float = 4.0
    max_context: int = 0
    """What a request may have; 0 = whatever the server says."""


class ServerFailedError(Exception):
    """The server ended or can't be used; another start may help."""


class EngineGivenUpError(Exception):
    """It failed to start too often; the text says why."""


class RunningServer(msgspec.Struct, frozen=True, kw_only=True):
    """A server that was started, or found."""

    url: str
    ended: Callable[[], Awaitable[str]]
    """Returns how it ended, once it did; never for attached ones."""


class Weights(Protocol):
    """What keeps the engine at the newest version."""

    @property
    def refused_version(self) -> int:
        """The newest version that could not be loaded, or -1."""
        ...

    async def catch_up(self) -> None:
        """Bring it to the newest version that can be loaded, however long that takes."""
        ...

    async def follow(self) -> None:
        """Load what is published, for ever."""
        ...


MakeWeights = Callable[
    [InferenceEngine, str, Callable[[EngineState, str], None], Callable[[WeightsLoaded], Awaitable[object]]], Weights
]
"""Engine, incarnation, whom to tell of quarantine, whom to tell of loads."""


class EngineLife:
    """Runs one engine until it is drained or given up."""

    def __init__(
        self,
        announcer: Announcer,
        settings: LifeSettings,
        *,
        start: Callable[[], AbstractAsyncContextManager[RunningServer]],
        connect: Callable[[str], AbstractAsyncContextManager[InferenceEngine]],
        make_weights: MakeWeights,
        draining: anyio.Event,
    ) -> None:
        """Args:
        start: starts or finds the server.
        connect: a client to its URL.
        """
        self._announcer: Final = announcer
        self._settings: Final = settings
        self._start: Final = start
        self._connect: Final = connect
        self._make_weights: Final = make_weights
        self._draining: Final = draining
        self._served = False
        self._attached: Final = announcer.current.attached
        self._quarantines = 0
        self._broken = ""
        """Why the engine's weights can't be trusted; empty: they can."""
        self._unwell = ""
        """Why it does not answer; empty: it does."""
        self._failure = ""
        """Why the server has to be started again, until it serves."""

    async def run(self) -> None:
        """Until drained.

        Raises:
            EngineGivenUpError: it did not start, several times in a row.
        """
        failed = 0
        while not self._draining.is_set():
            self._served = False
            try:
                await self._until_drained(self._live())
            except ServerFailedError as error:
                if self._draining.is_set():
                    return
                failed = 0 if self._served else failed + 1
                delay_s = min(self._settings.max_delay_s, self._settings.first_delay_s * 2**failed)
                if failed >= self._settings.max_failed_starts and not self._attached:
                    text = f"{self._announcer.current.name} failed to start {failed} times in a row: {error}"
                    self._announcer.be(EngineState.QUARANTINED, text)
                    await self._announcer.announce()
                    raise EngineGivenUpError(text) from error
                log.warning("the server is started again", reason=str(error), delay_s=delay_s)
                restarts = self._announcer.current.num_restarts + 1
                self._failure = str(error)
                self._begin(self._failure, url="", running=0, waiting=0, num_restarts=restarts)
                with anyio.move_on_after(delay_s):
                    await self._draining.wait()

    async def _until_drained(self, life: Awaitable[None]) -> None:
        """Run one life; draining cuts short whatever is no serving."""
        with _unwrapped():
            async with anyio.create_task_group() as tasks:

                async def end_early() -> None:
                    await self._draining.wait()
                    if self._announcer.current.state is not EngineState.SERVING:
                        tasks.cancel_scope.cancel()

                tasks.start_soon(end_early)
                await life
                tasks.cancel_scope.cancel()

    async def _live(self) -> None:
        """From a start to an end.

        Raises:
            ServerFailedError: it ended otherwise than by draining.
        """
        incarnation = f"{os.getpid():x}-{secrets.token_hex(3)}"
        self._quarantines, self._broken, self._unwell = 0, "", ""
        words = "waiting for the server" if self._attached else "the server starts"
        told = f"{words}: {self._failure}" if self._failure else words
        self._begin(told, incarnation=incarnation, refused_version=-1)
        async with self._start() as server, _ending_with(server), AsyncExitStack() as stack:
            engine, health = await self._until_ready(server.url, stack)
            self._announcer.be(EngineState.LOADING, "warming up", url=server.url, max_context=health.max_context)
            await self._warm_up(engine)
            weights = self._make_weights(engine, incarnation, self._on_quarantine, self._on_loaded)
            self._announcer.be(EngineState.LOADING, "the current weights", version=0)
            await weights.catch_up()
            self._announcer.tell(refused_version=weights.refused_version)
            self._failure = ""
            self._settle()
            self._served = True
            await self._serve(engine, weights, stack.aclose)

    def _begin(self, reason: str, **fields: object) -> None:
        """Starting; nobody starts an attached server that failed, so that it is quarantined until it is there again."""
        state = EngineState.QUARANTINED if self._attached and self._failure else EngineState.STARTING
        self._announcer.be(state, reason, **fields)

    async def _serve(self, engine: InferenceEngine, weights: Weights, hang_up: Callable[[], Awaitable[object]]) -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(weights.follow)
            tasks.start_soon(self._watch, engine, weights, hang_up)
            await self._draining.wait()
            self._announcer.be(EngineState.DRAINING, "told to end")
            await self._announcer.announce()
            with anyio.move_on_after(self._settings.drain_deadline_s):
                while (health := (await self._ask(engine))[0]) is not None and health.num_running:
                    await anyio.sleep(0.05)
            tasks.cancel_scope.cancel()

    async def _until_ready(self, url: str, stack: AsyncExitStack) -> tuple[InferenceEngine, EngineHealth]:
        """A client, once the server gives a healthy answer."""
        detail = ""
        deadline_s = None if self._attached else self._settings.start_timeout_s
        with anyio.move_on_after(deadline_s):
            while True:
                async with AsyncExitStack() as attempt:
                    try:
                        engine = await attempt.enter_async_context(self._connect(url))
                    except EngineError as error:
                        detail = str(error) or type(error).__name__
                    else:
                        health, detail = await self._ask(engine)
                        if health is not None:
                            stack.push_async_exit(attempt.pop_all().__aexit__)
                            return engine, health
                if self._attached:
                    self._begin(f"waiting for the server: {detail}")
                await anyio.sleep(self._settings.poll_s / 2)
        raise ServerFailedError(f"it was not healthy within {deadline_s:g} s: {detail}")

    async def _ask(self, engine: InferenceEngine) -> tuple[EngineHealth | None, str]:
        """Its health, or what is wrong."""
        try:
            with anyio.fail_after(self._settings.health_deadline_s):
                health = await engine.health()
        except TimeoutError:
            return None, f"no answer within {self._settings.health_deadline_s:g} s"
        except EngineError as error:
            return None, str(error) or type(error).__name__
        return (health, "") if health.ready else (None, health.detail or "it is not ready")

    async def _warm_up(self, engine: InferenceEngine) -> None:
        """A few tokens, before anybody waits for them. A swap that was cut off may have left an attached server on hold."""
        request = GenerateRequest(
            request_id=f"warm-up-{secrets.token_hex(4)}",
            prompt_ids=np.arange(1, 5, dtype=np.int32),
            settings=SamplingSettings(max_new_tokens=4),
        )
        try:
            with anyio.fail_after(self._settings.warm_up_deadline_s):
                if self._attached:
                    await engine.resume()
                async for _ in engine.generate(request):
                    pass
        except TimeoutError:
            raise ServerFailedError(f"it sampled nothing within {self._settings.warm_up_deadline_s:g} s") from None
        except EngineError as error:
            raise ServerFailedError(f"the first request failed: {error}") from error

    async def _watch(self, engine: InferenceEngine, weights: Weights, hang_up: Callable[[], Awaitable[object]]) -> None:
        """Look at the server now and then. A swap in its midst is shielded: where the server hangs, it ends when its connection
        is closed (`hang_up`).

        Raises:
            ServerFailedError: it has to be started again, or started anew by itself.
        """
        well_s = anyio.current_time()
        while True:
            health, detail = await self._ask(engine)
            now_s = anyio.current_time()
            if health is not None:
                well_s = now_s
                self._announcer.tell(running=health.num_running, waiting=health.num_waiting)
                if health.version < self._announcer.current.version:
                    raise ServerFailedError(
                        f"it serves version {health.version} where {self._announcer.current.version} was loaded: "
                        "it started anew"
                    )
            elif now_s - well_s > self._settings.unhealthy_s:
                await hang_up()
                raise ServerFailedError(f"not healthy for {now_s - well_s:.0f} s: {detail}")
            self._unwell = detail
            self._announcer.tell(refused_version=weights.refused_version)
            self._settle()
            if self._broken and self._quarantines > 1 and not self._attached:
                raise ServerFailedError(self._broken)
            await anyio.sleep(self._settings.poll_s)

    def _on_quarantine(self, state: EngineState, reason: str) -> None:
        """New weights failed in a way that leaves the engine in doubt, or it is well again."""
        quarantined = state is EngineState.QUARANTINED
        self._broken = (reason or "new weights failed") if quarantined else ""
        self._quarantines += quarantined
        if quarantined and self._served:
            self._settle()

    async def _on_loaded(self, loaded: WeightsLoaded) -> None:
        self._broken, self._quarantines = "", 0
        self._announcer.tell(version=loaded.version)
        if self._served:
            self._settle()
            await self._announcer.announce()

    def _settle(self) -> None:
        """Serving, or why not."""
        if self._draining.is_set():
            return
        reason = self._broken or self._unwell
        self._announcer.be(EngineState.QUARANTINED if reason else EngineState.SERVING, reason)


@asynccontextmanager
async def _ending_with(server: RunningServer) -> AsyncGenerator[None]:
    """Run the body until the server ends.

    Raises:
        ServerFailedError: it ended first.
    """
    with _unwrapped():
        async with anyio.create_task_group() as tasks:

            async def watch() -> None:
                raise ServerFailedError(await server.ended())

            tasks.start_soon(watch)
            yield
            tasks.cancel_scope.cancel()


@contextmanager
def _unwrapped() -> Generator[None]:
    """A ServerFailedError as itself instead of inside a task group's."""
    try:
        yield
    except BaseExceptionGroup as group:
        failures, rest = group.split(ServerFailedError)
        if failures is None or rest is not None:
            raise
        raise _first(failures) from None


def _first(group: BaseExceptionGroup[ServerFailedError]) -> ServerFailedError:
    for error in group.exceptions:
        if isinstance(error, ServerFailedError):
            return error
        return _first(error)
    return ServerFailedError("the server failed")
