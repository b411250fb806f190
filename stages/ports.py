"""What the stages need from the world outside, as Protocols.

Legend of shapes: P prompt tokens, C completion tokens of one call.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from enum import StrEnum
from typing import Protocol, runtime_checkable

import msgspec
import numpy as np
import numpy.typing as npt

from schemas.messages.rollout import FinishReason
from schemas.payload import PayloadRef

TokenIds = npt.NDArray[np.int32]
LogProbs = npt.NDArray[np.float32]


class Payloads(Protocol):
    """Content-addressed bytes: a stage stores first and names afterwards."""

    async def put(self, data: bytes | memoryview) -> PayloadRef: ...
    async def get(self, ref: PayloadRef) -> memoryview: ...


class EngineError(Exception):
    """Root of what an engine may raise."""


class ContextOverflowError(EngineError):
    """prompt + max_new_tokens does not fit the engine's context."""


class BadRequestError(EngineError):
    """The engine refused the request for what it asks; another engine would too."""


class EngineUnavailableError(EngineError):
    """The engine is away, dying or pausing for too long: another may answer."""


class NoEngineError(EngineError):
    """No engine that may take the request came within the deadline; the text says what was waited for."""


class EngineBusyError(EngineError):
    """Every engine that may take the request was full until the deadline."""


class WeightsRefusedError(EngineError):
    """New weights don't fit or are damaged; the old version still serves."""


class SamplingSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How tokens are drawn."""

    temperature: float = 1.0
    """0 = greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 = all."""
    max_new_tokens: int
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    """Stop strings, found by whoever decodes."""
    seed: int | None = None


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One call: ids in."""

    request_id: str
    prompt_ids: TokenIds
    """[P] int32."""
    settings: SamplingSettings
    min_version: int = 0
    """The engine must serve at least this weight version."""
    session: str = ""
    """For affinity: calls of one session share prefixes."""


class TokenChunk(msgspec.Struct, frozen=True, kw_only=True):
    """Some tokens that were sampled: ids out."""

    token_ids: TokenIds
    """[C] int32."""
    logprobs: LogProbs
    """[C] float32, at the request's temperature, over the whole vocabulary."""
    version: int
    """Weight version that sampled them; a chunk never mixes two."""
    finish_reason: FinishReason | None = None
    """Set on the last chunk, which may be empty."""
    stop_reason: str | int | None = None
    """The stop string or token that ended it."""


class SwapMode(StrEnum):
    """What happens to running requests when new weights come."""

    IN_PLACE = "in_place"
    """Go on with the old KV cache: fast; log-probs across the swap are approximate."""
    RECOMPUTE = "recompute"
    """Go on after recomputing the KV cache with the new weights: exact."""
    ABORT = "abort"
    """End them with reason abort; whoever asked goes on from the partial tokens."""
    DRAIN = "drain"
    """Let them end first."""


class EngineHealth(msgspec.Struct, frozen=True, kw_only=True):
    """How an engine is."""

    ready: bool
    version: int
    num_running: int
    num_waiting: int
    max_context: int
    detail: str = ""
    newest_version: int | None = None
    """Of several engines, whose oldest version is `version`: the newest that one of them serves."""

    def serves(self, version: int) -> bool:
        """Whether requests for this version or a newer one can be sampled now."""
        newest = self.version if self.newest_version is None else self.newest_version
        return self.ready and newest >= version


class TokenSource(Protocol):
    """Token ids in, token ids with log-probs and versions out: an engine, or a router over several."""

    @property
    def name(self) -> str: ...

    def generate(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        """Sample until a stop; closing the iterator aborts the request.

        Raises:
            ContextOverflowError, BadRequestError, EngineUnavailableError.
            NoEngineError, EngineBusyError: a router's wait for an engine ended.
        """
        ...

    async def health(self) -> EngineHealth: ...


class InferenceEngine(TokenSource, Protocol):
    """One engine, and what is done to it."""

    async def abort(self, request_id: str) -> None:
        """End a running request with finish reason abort; unknown ids are fine."""
        ...

    async def pause(self) -> None:
        """Sample no further token until resume; requests stay."""
        ...

    async def resume(self) -> None: ...

    async def load_weights(self, directory: str, version: int, mode: SwapMode) -> None:
        """Serve the weights of a HF folder (safetensors) from now on; no prefix cached under former weights is used for
        requests that come later.

        Raises:
            WeightsRefusedError: names, shapes or files don't fit, or the swap was given up; the old weights still serve.
            EngineUnavailableError: its weights are not known to be whole any more: it must not be asked until a load
                succeeds.
        """
        ...


@runtime_checkable
class TakesAdapters(Protocol):
    """An engine that can serve a LoRA adapter on top of the weights that it started with."""

    async def load_adapter(self, directory: str, version: int, mode: SwapMode) -> None:
        """Serve version 0 with the adapter of a folder (peft's adapter_config.json and adapter_model.safetensors) from now
        on, as `load_weights` does with whole weights, and with its errors.
        """
        ...


@runtime_checkable
class Sleeps(Protocol):
    """An engine that can give up its accelerator memory for a while, for a trainer on the same machine."""

    async def sleep(self) -> None:
        """Sample no further token and free what can be freed until `wake`; requests stay, or end with reason abort.

        Raises:
            EngineUnavailableError: it did not go to sleep.
        """
        ...

    async def wake(self) -> None:
        """Go on with the weights that it had.

        Raises:
            EngineUnavailableError: it did not wake up.
        """
        ...


class TemplateError(Exception):
    """The chat template refuses the messages."""


class Tokenizer(Protocol):
    """Text and messages to ids and back."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def stop_token_ids(self) -> tuple[int, ...]: ...
    def render(
        self, messages: list[dict[str, object]], *, tools: list[dict[str, object]] | None, add_generation_prompt: bool
    ) -> TokenIds:
        """Chat messages (OpenAI form, arguments as dicts) to ids, [P] int32.

        Raises:
            TemplateError: the template refuses the messages.
        """
        ...

    def encode(self, text: str) -> TokenIds: ...
    def decode(self, token_ids: TokenIds) -> str:
        """Text of sampled ids, special tokens left out."""
        ...


class ForwardedAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """What another gateway answered to a request that was passed on to it."""

    status: int
    headers: list[tuple[str, str]]
    body: AsyncIterator[bytes]
    """As it comes; to be read to its end or closed."""
