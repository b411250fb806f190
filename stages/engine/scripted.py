"""A scripted engine for tests: a function from prompt to completion, the port's rules, no torch."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import anyio
import numpy as np

from schemas.messages.rollout import FinishReason
from stages.engine.admission import check_request
from stages.ports import (
    EngineHealth,
    EngineUnavailableError,
    GenerateRequest,
    SwapMode,
    TokenChunk,
    TokenIds,
    WeightsRefusedError,
)

Script = Callable[[TokenIds, int], Sequence[int]]
"""Prompt ids and the request's number (0, 1, …) to the ids of the whole completion, stop token included."""


class ScriptedEngine:
    """Answers with what the script says, `chunk_tokens` at a time and `delay_s` apart, each token's log-prob a fixed number."""

    def __init__(
        self,
        script: Script,
        *,
        name: str = "scripted",
        vocab_size: int = 264,
        max_context: int = 4096,
        version: int = 0,
        chunk_tokens: int = 4,
        logprob: float = -0.5,
        delay_s: float = 0.0,
        load_s: float = 0.0,
        keep_calls: bool = False,
    ) -> None:
        """Args:
        script: what it answers.
        name: who answers.
        vocab_size: larger ids are refused.
        max_context: most tokens of prompt and completion.
        version: weights in the beginning.
        chunk_tokens: tokens a chunk.
        logprob: of each token.
        delay_s: before each chunk.
        load_s: what loading weights takes.
        keep_calls: keep all in `requests` and `loads`, for tests; a run of days must not.
        """
        self._script = script
        self._name = name
        self._vocab_size = vocab_size
        self._max_context = max_context
        self._chunk_tokens = chunk_tokens
        self._logprob = logprob
        self._delay_s = delay_s
        self._load_s = load_s
        self._running: dict[str, bool] = {}
        """request id → whether it was aborted."""
        self._go = anyio.Event()
        self._go.set()
        self.version = version
        self.failing = ""
        """Set it to make the engine unavailable, for the reason given."""
        self.num_requests = 0
        self._keep_calls = keep_calls
        self.requests: list[GenerateRequest] = []
        self.loads: list[tuple[str, int, SwapMode]] = []

    @property
    def name(self) -> str:
        """Who answers."""
        return self._name

    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        """Play the script; aborts, pauses and version changes act between chunks."""
        if self.failing:
            raise EngineUnavailableError(self.failing)
        check_request(request, vocab_size=self._vocab_size, max_context=self._max_context, version=self.version)
        number = self.num_requests
        self.num_requests += 1
        if self._keep_calls:
            self.requests.append(request)
        full = list(self._script(request.prompt_ids, number))
        ids = full[: request.settings.max_new_tokens]
        stops = request.settings.stop_token_ids
        end = next((i + 1 for i, token in enumerate(ids) if token in stops), None)
        ids = ids[:end]
        self._running[request.request_id] = False
        try:
            for start in range(0, max(len(ids), 1), self._chunk_tokens):
                await self._go.wait()
                await anyio.sleep(self._delay_s)
                if self.failing:
                    raise EngineUnavailableError(self.failing)
                if self._running[request.request_id]:
                    yield self._chunk([], FinishReason.ABORT)
                    return
                part = ids[start : start + self._chunk_tokens]
                if start + self._chunk_tokens < len(ids):
                    yield self._chunk(part, None)
                elif end is None and len(full) >= request.settings.max_new_tokens:
                    yield self._chunk(part, FinishReason.LENGTH)
                else:
                    yield self._chunk(part, FinishReason.STOP)
        finally:
            self._running.pop(request.request_id, None)

    def _chunk(self, ids: Sequence[int], finish: FinishReason | None) -> TokenChunk:
        return TokenChunk(
            token_ids=np.array(ids, dtype=np.int32),
            logprobs=np.full(len(ids), self._logprob, dtype=np.float32),
            version=self.version,
            finish_reason=finish,
            stop_reason=ids[-1] if finish is FinishReason.STOP and ids else None,
        )

    async def abort(self, request_id: str) -> None:
        """End a running request with finish reason abort; unknown ids are fine."""
        if request_id in self._running:
            self._running[request_id] = True

    async def pause(self) -> None:
        """Hand out no further chunk until resume."""
        self._go = anyio.Event()

    async def resume(self) -> None:
        """Go on."""
        self._go.set()

    async def load_weights(self, directory: str, version: int, mode: SwapMode) -> None:
        """Take the version over; the folder must exist, its content is nobody's business here.

        Raises:
            WeightsRefusedError: There is no such folder.
        """
        if not await anyio.Path(directory).is_dir():
            raise WeightsRefusedError(f"expected a folder, found nothing at {Path(directory)}")
        await anyio.sleep(self._load_s)
        if mode is SwapMode.ABORT:
            self._running = dict.fromkeys(self._running, True)
        if self._keep_calls:
            self.loads.append((directory, version, mode))
        self.version = version

    async def health(self) -> EngineHealth:
        """How it is."""
        return EngineHealth(
            ready=not self.failing,
            version=self.version,
            num_running=len(self._running),
            num_waiting=0,
            max_context=self._max_context,
            detail=self.failing,
        )
