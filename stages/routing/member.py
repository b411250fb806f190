"""An engine in the router's hands: what it said, what is in it, how much it may have."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Final

import anyio
import msgspec

from schemas.messages.engines import EngineAnnouncement, EngineState
from stages.ports import EngineUnavailableError, InferenceEngine, TokenChunk
from stages.routing.admission import told
from stages.routing.choosing import Candidate
from stages.routing.concurrency import slots
from stages.routing.quarantine import Quarantine

_WORKING: Final = (EngineState.SERVING, EngineState.LOADING, EngineState.DRAINING)
"""States in which requests that run go on."""


class Member:
    """Changed by the router alone."""

    def __init__(self, engine: InferenceEngine, announced: EngineAnnouncement, now_s: float) -> None:
        self.engine: Final = engine
        self.announced = announced
        self.heard_s = now_s
        self.admitted = False
        """It took requests with the current weights once: it may lag behind while new ones are loaded."""
        self.not_admitted = ""
        self.quarantine: Quarantine | None = None
        self.probing = False
        self.limit = float(max(announced.capacity, 1))
        self.decreased_s = float("-inf")
        """When its limit was last lowered."""
        self.in_flight = 0
        self.last_chosen = 0
        """Number of the choice that fell on it last."""
        self.others = 0
        """Requests of other gateways in it, as of its last announcement."""
        self.gone = ""
        """Why requests in it can't go on."""
        self._scopes: Final[set[anyio.CancelScope]] = set()

    @property
    def name(self) -> str:
        """Its name in the run."""
        return self.announced.name

    def hear(self, announced: EngineAnnouncement, now_s: float) -> None:
        """Take in what it says of itself."""
        if announced.incarnation != self.announced.incarnation:
            self.admitted, self.quarantine, self.gone = False, None, ""
            self.limit = float(max(announced.capacity, 1))
        self.announced, self.heard_s = announced, now_s
        self.limit = min(self.limit, float(max(announced.capacity, 1)))
        self.others = max(0, announced.running + announced.waiting - self.in_flight)
        if announced.state in _WORKING:
            self.gone = ""
        else:
            self.end(told(announced))

    def end(self, reason: str) -> None:
        """Requests in it go on elsewhere."""
        self.gone = reason
        for scope in tuple(self._scopes):
            scope.cancel()

    def kept_away(self, now_s: float, silent_s: float) -> str:
        """Why it takes nothing now; empty: it takes requests."""
        if self.announced.state is not EngineState.SERVING:
            return told(self.announced)
        if now_s - self.heard_s > silent_s:
            return f"was not heard for {now_s - self.heard_s:.0f} s"
        if self.quarantine is not None:
            return f"quarantined: {self.quarantine.reason}"
        return "" if self.admitted else self.not_admitted

    def candidate(self, now_s: float, silent_s: float) -> Candidate:
        """As the choice sees it."""
        return Candidate(
            name=self.name,
            version=self.announced.version,
            in_flight=self.in_flight,
            others=self.others,
            limit=slots(self.limit),
            last_chosen=self.last_chosen,
            kept_away=self.kept_away(now_s, silent_s),
        )

    def check(self, chunk: TokenChunk, min_version: int) -> None:
        """Tokens older than the request may have are never passed on: the server started anew and its worker has not seen it yet.

        Raises:
            EngineUnavailableError: they are.
        """
        if chunk.token_ids.size and chunk.version < min_version:
            self.announced = msgspec.structs.replace(self.announced, version=chunk.version)
            raise EngineUnavailableError(
                f"{self.name}: expected version {min_version} or newer, found tokens of version {chunk.version}"
            )

    async def next_chunk(self, chunks: AsyncIterator[TokenChunk]) -> TokenChunk:
        """The next tokens of a request in it.

        Raises:
            EngineUnavailableError: it went away meanwhile, or its stream ended without a finish reason.
        """
        if not self.gone:
            with anyio.CancelScope() as scope:
                self._scopes.add(scope)
                try:
                    return await anext(chunks)
                except StopAsyncIteration:
                    raise EngineUnavailableError(f"{self.name}: its stream ended without a finish reason") from None
                finally:
                    self._scopes.discard(scope)
        raise EngineUnavailableError(f"{self.name} went away: {self.gone}")
