"""An engine worker's voice: what it says of its engine, every second and at once at every change; the same in its report."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

import anyio
import msgspec
import structlog

from broker.api import Broker
from broker.errors import BrokerError
from pipeline.metrics import Metrics
from schemas.messages.engines import EngineAnnouncement, EngineState, engine_subject
from stages.weights.receive import STATE_LABEL

log = structlog.get_logger("headrace.engine")

PERIOD_S: Final = 1.0
_REASON_CHARS: Final = 300
_FIGURES: Final = ("version", "running", "waiting", "capacity", "num_restarts")


def fault(told: EngineAnnouncement) -> str:
    """Why an engine is out of service: quarantined, or its server is started again; empty where nothing is wrong. Pure."""
    match told.state:
        case EngineState.QUARANTINED:
            return told.reason or told.state.value
        case EngineState.STARTING | EngineState.LOADING if told.num_restarts:
            return _in_words(told)
        case _:
            return ""


def _in_words(told: EngineAnnouncement) -> str:
    return f"{told.state.value}: {told.reason}" if told.reason else told.state.value


class Announcer:
    """Holds the newest announcement of one engine."""

    def __init__(
        self, broker: Broker, first: EngineAnnouncement, metrics: Metrics, *, now: Callable[[], float] = time.time
    ) -> None:
        self.current = msgspec.structs.replace(first, since_unix_s=now())
        self._broker: Final = broker
        self._metrics: Final = metrics
        self._now: Final = now
        self._changed = anyio.Event()

    def be(self, state: EngineState, reason: str = "", **fields: object) -> None:
        """A change of state, told at once; the same words again change nothing."""
        since = self._now() if state is not self.current.state else self.current.since_unix_s
        self._set(state=state, reason=reason, since_unix_s=since, **fields)

    def tell(self, **fields: object) -> None:
        """Other fields: told with the next announcement, a new version or incarnation at once."""
        self._set(**fields)

    def _set(self, **fields: object) -> None:
        before = self.current
        self.current = msgspec.structs.replace(before, **fields)
        told = (self.current.state, self.current.reason, self.current.version, self.current.incarnation)
        if told != (before.state, before.reason, before.version, before.incarnation):
            self._changed.set()
            if self.current.state is not before.state:
                log.info("engine", state=self.current.state.value, reason=self.current.reason, url=self.current.url)

    async def run(self) -> None:
        """Announce, for ever. A broker that is away only makes it silent."""
        while True:
            self._changed = anyio.Event()
            await self.announce()
            with anyio.move_on_after(PERIOD_S):
                await self._changed.wait()

    async def announce(self) -> None:
        """Say it once, now."""
        told = msgspec.structs.replace(self.current, unix_time_s=self._now())
        self._report(told)
        try:
            await self._broker.announce(engine_subject(self._broker.run, told.name), msgspec.msgpack.encode(told))
        except BrokerError as error:
            log.debug("an announcement was lost", error=str(error))

    def _report(self, told: EngineAnnouncement) -> None:
        self._metrics.labels.update(engine=told.name, url=told.url, state=told.state.value)
        self._metrics.gauges.update({name: float(getattr(told, name)) for name in _FIGURES})
        self._metrics.in_flight = told.running
        if wrong := fault(told):
            self._metrics.labels[STATE_LABEL] = wrong[:_REASON_CHARS]
        elif told.state in (EngineState.SERVING, EngineState.DRAINING):
            self._metrics.labels.pop(STATE_LABEL, None)
        if told.state is not EngineState.SERVING:
            self._metrics.wait_for(_in_words(told))
        elif told.running:
            self._metrics.work()
        else:
            self._metrics.wait_for("calls")
