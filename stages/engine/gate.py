"""An engine behind a gate: while it is shut, nobody gets an answer whose weights are not known."""

from __future__ import annotations

from collections.abc import AsyncIterator

from schemas.messages.engines import EngineState
from stages.ports import (
    EngineHealth,
    EngineUnavailableError,
    GenerateRequest,
    InferenceEngine,
    SwapMode,
    TokenChunk,
)


class GatedEngine:
    """Passes everything on; in quarantine it is unavailable for requests, not for new weights."""

    def __init__(self, engine: InferenceEngine) -> None:
        self._engine = engine
        self._shut = ""

    def be(self, state: EngineState, reason: str) -> None:
        """Quarantined: refuse requests for this reason; running ones end as unavailable at their next tokens. Else: take them."""
        self._shut = reason if state is EngineState.QUARANTINED else ""

    @property
    def name(self) -> str:
        return self._engine.name

    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        self._check()
        async for chunk in self._engine.generate(request):
            self._check()
            yield chunk

    def _check(self) -> None:
        if self._shut:
            raise EngineUnavailableError(f"engine {self.name} is quarantined: {self._shut}")

    async def abort(self, request_id: str) -> None:
        await self._engine.abort(request_id)

    async def pause(self) -> None:
        await self._engine.pause()

    async def resume(self) -> None:
        await self._engine.resume()

    async def load_weights(self, directory: str, version: int, mode: SwapMode) -> None:
        await self._engine.load_weights(directory, version, mode)

    async def health(self) -> EngineHealth:
        found = await self._engine.health()
        if not self._shut:
            return found
        return EngineHealth(
            ready=False,
            version=found.version,
            num_running=found.num_running,
            num_waiting=found.num_waiting,
            max_context=found.max_context,
            detail=f"quarantined: {self._shut}",
        )
