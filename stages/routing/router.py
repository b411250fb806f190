"""A pool of engines behind the port of one: each request to an engine that may sample it, failures out of the way.

Each call waits in order of arrival until an engine has room that is in service and confirmed the version the call needs. A failed engine
is quarantined and probed; the call's error is EngineUnavailableError, and whoever asked asks again with the tokens that it got.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final

import anyio
import structlog

from schemas.messages.engines import EngineAnnouncement, EngineState
from stages.ports import (
    EngineBusyError,
    EngineError,
    EngineHealth,
    EngineUnavailableError,
    GenerateRequest,
    InferenceEngine,
    NoEngineError,
    TokenChunk,
)
from stages.routing.admission import not_admitted, told
from stages.routing.choosing import Candidate, Choice, choose
from stages.routing.concurrency import decreased, increased, slots
from stages.routing.member import Member
from stages.routing.quarantine import Quarantine, quarantined
from stages.routing.settings import RoutingSettings

log = structlog.get_logger("headrace.routing")


class _Waiter:
    """A request without an engine."""

    __slots__ = ("given", "member", "reason", "request")

    def __init__(self, request: GenerateRequest, choice: Choice) -> None:
        self.request: Final = request
        self.given: Final = anyio.Event()
        self.member: Member | None = None
        self.reason = choice


class Router:
    """`TokenSource` over all engines of a run."""

    def __init__(self, settings: RoutingSettings, *, now: Callable[[], float] = anyio.current_time) -> None:
        self._settings: Final = settings
        self._now: Final = now
        self._members: Final[dict[str, Member]] = {}
        self._homes: Final[OrderedDict[str, str]] = OrderedDict()
        """session → engine of its last call."""
        self._waiting: Final[OrderedDict[int, _Waiter]] = OrderedDict()
        self._num_waiters = 0
        self._num_choices = 0
        self._away: Final[dict[str, tuple[str, float]]] = {}
        """Engines without a server that answers: why, for whoever waits; when they were heard."""
        self._published = 0
        self._quarantined = anyio.Event()
        self.num_tokens = 0
        """Sampled since the start."""
        self.num_failures = 0

    @property
    def name(self) -> str:
        """Who answers."""
        return "router"

    @property
    def members(self) -> list[Member]:
        """The engines, in order of their names."""
        return [self._members[name] for name in sorted(self._members)]

    # -- who is there

    def join(self, engine: InferenceEngine, announced: EngineAnnouncement) -> None:
        """An engine is there; it takes requests once it serves the current weights."""
        self._away.pop(announced.name, None)
        self._members[announced.name] = Member(engine, announced, self._now())
        self._settle(self._members[announced.name])

    def leave(self, name: str, reason: str) -> None:
        """An engine is gone; requests in it go on elsewhere."""
        member = self._members.pop(name, None)
        if member is not None:
            member.end(reason)
            log.info("an engine left", engine=name, reason=reason)
            self._dispatch()

    def hear(self, announced: EngineAnnouncement) -> None:
        """An engine that joined says how it is."""
        member = self._members.get(announced.name)
        if member is None:
            return
        member.hear(announced, self._now())
        if announced.waiting > 0:
            self._lower(member)
        self._settle(member)

    def away(self, announced: EngineAnnouncement) -> None:
        """An engine says how it is and has no server that answers."""
        self._away[announced.name] = (told(announced), self._now())

    def publish(self, version: int) -> None:
        """A version stands on the log."""
        self._published = max(self._published, version)

    def forget_silent(self) -> list[str]:
        """Let the engines leave that were not heard for long; their names."""
        now_s = self._now()
        for name in [name for name, (_, heard_s) in self._away.items() if now_s - heard_s > self._settings.silent_s]:
            del self._away[name]
        gone = [name for name, one in self._members.items() if now_s - one.heard_s > self._settings.forget_s]
        for name in gone:
            self.leave(name, f"not heard for {self._settings.forget_s:g} s")
        return gone

    def _settle(self, member: Member) -> None:
        """Let a member in that may come in, and give out its room."""
        if not member.admitted:
            fleet = [one.announced.version for one in self._members.values() if one.admitted]
            member.not_admitted = not_admitted(member.announced, published=self._published, fleet=fleet)
            member.admitted = not member.not_admitted
            if member.admitted:
                log.info("an engine takes requests", engine=member.name, version=member.announced.version)
        self._dispatch()

    # -- requests

    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        """Sample in the engine that `choose` gives, once it has room.

        Raises:
            EngineUnavailableError: the engine failed or went away; ask again with the tokens that came.
            NoEngineError, EngineBusyError: none came within the deadline.
            ContextOverflowError, BadRequestError: any engine would refuse it.
        """
        member = await self._acquire(request)
        try:
            async with _closing(member.engine.generate(request)) as chunks:
                while True:
                    chunk = await member.next_chunk(chunks)
                    member.check(chunk, request.min_version)
                    self.num_tokens += int(chunk.token_ids.size)
                    yield chunk
                    if chunk.finish_reason is not None:
                        break
            member.limit = increased(member.limit, member.announced.capacity)
        except EngineUnavailableError as error:
            self._failed(member, str(error))
            raise
        finally:
            member.in_flight -= 1
            self._dispatch()

    async def health(self) -> EngineHealth:
        """All engines together: the oldest version that is served, what runs, what waits here."""
        serving = [one for one in self._members.values() if one.announced.state is EngineState.SERVING]
        return EngineHealth(
            ready=any(not one.kept_away(self._now(), self._settings.silent_s) for one in serving),
            version=min((one.announced.version for one in serving), default=0),
            num_running=sum(one.in_flight for one in self._members.values()),
            num_waiting=len(self._waiting),
            max_context=min((one.announced.max_context for one in serving), default=0),
            detail=self.waits_for(),
            newest_version=max((one.announced.version for one in serving), default=0),
        )

    def waits_for(self) -> str:
        """What the longest waiting call waits for; empty: none waits."""
        first = next(iter(self._waiting.values()), None)
        return "" if first is None else first.reason.reason

    async def _acquire(self, request: GenerateRequest) -> Member:
        """A slot of an engine.

        Raises:
            NoEngineError, EngineBusyError: none within the deadline.
        """
        choice = self._choose(request)
        if choice.name and not self._waiting:
            return self._take(request, choice.name)
        waiter = _Waiter(request, choice)
        self._num_waiters += 1
        number = self._num_waiters
        self._waiting[number] = waiter
        self._dispatch()
        try:
            with anyio.move_on_after(self._settings.wait_deadline_s):
                await waiter.given.wait()
        except BaseException:
            if waiter.member is not None:  # cancelled in the very moment it was served
                waiter.member.in_flight -= 1
                self._dispatch()
            raise
        finally:
            self._waiting.pop(number, None)
        if waiter.member is not None:
            return waiter.member
        text = f"waited {self._settings.wait_deadline_s:g} s for {waiter.reason.reason}"
        raise EngineBusyError(text) if waiter.reason.full else NoEngineError(text)

    def _choose(self, request: GenerateRequest) -> Choice:
        now_s, silent_s = self._now(), self._settings.silent_s
        return choose(
            [
                *(one.candidate(now_s, silent_s) for one in self._members.values()),
                *(Candidate(name=n, version=0, in_flight=0, limit=1, kept_away=w) for n, (w, _) in self._away.items()),
            ],
            min_version=request.min_version,
            home=self._homes.get(request.session, ""),
            slack=self._settings.affinity_slack,
        )

    def _take(self, request: GenerateRequest, name: str) -> Member:
        member = self._members[name]
        member.in_flight += 1
        self._num_choices += 1
        member.last_chosen = self._num_choices
        if request.session:
            self._homes[request.session] = name
            self._homes.move_to_end(request.session)
            while len(self._homes) > self._settings.max_sessions:
                self._homes.popitem(last=False)
        return member

    def _dispatch(self) -> None:
        """Give free slots to who waits, the first come first; one that waits for a newer version holds up nobody."""
        for number, waiter in list(self._waiting.items()):
            waiter.reason = self._choose(waiter.request)
            if waiter.reason.name:
                waiter.member = self._take(waiter.request, waiter.reason.name)
                waiter.given.set()
                del self._waiting[number]
            elif not any(slots(one.limit) > one.in_flight for one in self._members.values()):
                return

    # -- failures

    def _failed(self, member: Member, reason: str) -> None:
        self.num_failures += 1
        if self._members.get(member.name) is not member or member.gone:
            return  # it left, or its worker said so before
        before = member.quarantine
        member.quarantine = self._longer(before, reason)
        self._lower(member)
        if before is None:
            log.warning("an engine is quarantined", engine=member.name, reason=reason)
        self._quarantined.set()

    def _lower(self, member: Member) -> None:
        if self._now() - member.decreased_s >= self._settings.congestion_period_s:
            member.decreased_s = self._now()
            member.limit = decreased(member.limit, member.announced.capacity, self._settings.decrease)

    async def run(self) -> None:
        """Probe quarantined engines, for ever."""
        async with anyio.create_task_group() as tasks:
            while True:
                await self._quarantined.wait()
                self._quarantined = anyio.Event()
                for member in self._members.values():
                    if member.quarantine is not None and not member.probing:
                        member.probing = True
                        tasks.start_soon(self._probe, member)

    async def _probe(self, member: Member) -> None:
        """Ask an engine until it is well, or leaves."""
        try:
            while (quarantine := self._quarantine_of(member)) is not None:
                await anyio.sleep(max(0.0, quarantine.until_s - self._now()))
                problem = await self._ask(member)
                if self._quarantine_of(member) is None:
                    return  # a new server took its place meanwhile
                if not problem:
                    log.info("an engine is back", engine=member.name, after=quarantine.reason)
                    member.quarantine = None
                    self._dispatch()
                    return
                member.quarantine = self._longer(quarantine, problem)
        finally:
            member.probing = False

    def _quarantine_of(self, member: Member) -> Quarantine | None:
        """Its quarantine, while it is a member."""
        return member.quarantine if self._members.get(member.name) is member else None

    def _longer(self, before: Quarantine | None, reason: str) -> Quarantine:
        settings = self._settings
        first_s, max_s = settings.first_quarantine_s, settings.max_quarantine_s
        return quarantined(before, reason, self._now(), first_s=first_s, max_s=max_s)

    async def _ask(self, member: Member) -> str:
        """What is wrong with an engine; empty: it is ready."""
        try:
            with anyio.fail_after(self._settings.probe_deadline_s):
                health = await member.engine.health()
        except TimeoutError:
            return f"it did not say how it is within {self._settings.probe_deadline_s:g} s"
        except EngineError as error:
            return str(error) or type(error).__name__
        return "" if health.ready else health.detail or "it is not ready"


@asynccontextmanager
async def _closing(chunks: AsyncIterator[TokenChunk]) -> AsyncGenerator[AsyncIterator[TokenChunk]]:
    """Close the iterator whatever happens: that aborts the request in the engine."""
    try:
        yield chunks
    finally:
        close = getattr(chunks, "aclose", None)
        if close is not None:
            await close()
