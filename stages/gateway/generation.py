"""One answer from the engine: ids in, ids out, across aborts and lost engines, with only the remaining budget each time."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Final

import anyio
import msgspec
import numpy as np

from schemas.messages.rollout import FinishReason
from stages.gateway.budget import remaining_budget
from stages.gateway.errors import (
    BusyError,
    ContextLengthExceededError,
    EngineFaultError,
    InvalidRequestError,
    UnavailableError,
)
from stages.gateway.settings import GatewayLimits
from stages.ports import (
    BadRequestError,
    ContextOverflowError,
    EngineBusyError,
    EngineUnavailableError,
    GenerateRequest,
    LogProbs,
    NoEngineError,
    TokenChunk,
    TokenIds,
    TokenSource,
)

_MAX_DELAY_S = 5.0
_RETRY_AFTER_S = 5

OnIds = Callable[[TokenIds], Awaitable[int | None]]
"""Gets the ids of a chunk; returns None, or how many of them still count because a stop string ended the answer there."""


class Sampled:
    """What was sampled so far for one answer."""

    __slots__ = ("_ids", "_joined", "_logprobs", "fault", "finish", "num", "stopped_by_string", "versions")

    def __init__(self) -> None:
        self._ids: list[TokenIds] = []
        self._joined: TokenIds | None = None
        self._logprobs: list[LogProbs] = []
        self.versions: Final[list[tuple[int, int]]] = []
        """(weight version, tokens in a row that it sampled)."""
        self.num = 0
        self.finish = FinishReason.STOP
        self.stopped_by_string = False
        self.fault = ""
        """What is wrong with the engine's log-probs: such an answer is never trained on."""

    def add(self, chunk: TokenChunk, length: int) -> None:
        """The first `length` tokens of a chunk."""
        if chunk.logprobs.size != chunk.token_ids.size:
            self.fault = f"{chunk.token_ids.size} ids came with {chunk.logprobs.size} log-probs"
        whole = length == chunk.token_ids.size
        self._ids.append(chunk.token_ids if whole else chunk.token_ids[:length])
        self._logprobs.append(chunk.logprobs if whole else chunk.logprobs[:length])
        if self.versions and self.versions[-1][0] == chunk.version:
            self.versions[-1] = (chunk.version, self.versions[-1][1] + length)
        elif length:
            self.versions.append((chunk.version, length))
        self._joined = None
        self.num += length

    def ids(self) -> TokenIds:
        """[C] int32."""
        if self._joined is None:
            self._joined = np.concatenate(self._ids) if self._ids else np.empty(0, dtype=np.int32)
        return self._joined

    def logprobs(self) -> LogProbs:
        """[C] float32, all finite; what the engine did not give or gave as no number is 0 and `fault` says so."""
        given = np.concatenate(self._logprobs) if self._logprobs else np.empty(0, dtype=np.float32)
        if given.size != self.num:
            given = np.zeros(self.num, dtype=np.float32)
        finite = np.isfinite(given)
        if not finite.all():
            self.fault = f"{int((~finite).sum())} of {self.num} log-probs are no finite numbers"
            given = np.where(finite, given, np.float32(0))
        return given


async def sample(
    engine: TokenSource, request: GenerateRequest, *, limits: GatewayLimits, context_length: int, on_ids: OnIds
) -> Sampled:
    """Sample one whole answer.

    Raises:
        ContextLengthExceededError, InvalidRequestError: the engine refused the request.
        BusyError: every engine was full for as long as a call may wait.
        UnavailableError: no engine answered in `max_resumes` more tries, or none may answer.
        EngineFaultError: the engine sent what is no stream of tokens.
    """
    sampled = Sampled()
    num_prompt = int(request.prompt_ids.size)
    delay_s = limits.resume_delay_s
    resumes = lost = 0
    while True:
        left = remaining_budget(
            max_response=request.settings.max_new_tokens,
            max_context=context_length,
            num_prompt=num_prompt,
            num_generated=sampled.num,
        )
        if left == 0:
            sampled.finish = FinishReason.LENGTH
            return sampled
        before = sampled.num
        failure = await _attempt(engine, _resumed(request, sampled, resumes, left), sampled, on_ids, context_length)
        if not failure and sampled.finish is not FinishReason.ABORT:
            return sampled
        resumes += 1
        if sampled.num > before and not failure:  # aborted by new weights: a long answer ends, however often they come
            continue
        lost += 1
        if lost > limits.max_resumes:
            raise UnavailableError(f"no engine answered after {lost} tries: {failure or 'aborted before a token came'}")
        if failure:
            await anyio.sleep(delay_s)
            delay_s = min(delay_s * 2, _MAX_DELAY_S)


async def _attempt(
    engine: TokenSource, request: GenerateRequest, sampled: Sampled, on_ids: OnIds, context_length: int
) -> str:
    """Sample on until the engine ends the answer; why it could not, where another try may help.

    Raises:
        GatewayError: no other try would help.
    """
    try:
        await _run_once(engine, request, sampled, on_ids)
    except EngineUnavailableError as error:
        return str(error) or type(error).__name__
    except NoEngineError as error:
        raise UnavailableError(str(error), retry_after_s=_RETRY_AFTER_S) from error
    except EngineBusyError as error:
        raise BusyError(str(error), retry_after_s=_RETRY_AFTER_S) from error
    except ContextOverflowError as error:
        raise ContextLengthExceededError(int(request.prompt_ids.size), context_length - 1) from error
    except BadRequestError as error:
        raise InvalidRequestError(f"the engine refuses the request: {error}") from error
    return ""


def _resumed(request: GenerateRequest, sampled: Sampled, resume: int, left: int) -> GenerateRequest:
    if resume == 0:
        return request
    return msgspec.structs.replace(
        request,
        request_id=f"{request.request_id}-{resume}",
        prompt_ids=np.concatenate((request.prompt_ids, sampled.ids())),
        settings=msgspec.structs.replace(request.settings, max_new_tokens=left),
    )


async def _run_once(engine: TokenSource, request: GenerateRequest, sampled: Sampled, on_ids: OnIds) -> None:
    budget = request.settings.max_new_tokens
    first = sampled.num
    async with _closing(engine.generate(request)) as chunks:
        async for chunk in chunks:
            size = int(chunk.token_ids.size)
            if sampled.num - first + size > budget:
                raise EngineFaultError(f"the engine sampled more than the {budget} tokens it was asked for")
            kept = await on_ids(chunk.token_ids) if size else None
            sampled.add(chunk, size if kept is None else kept)
            if kept is not None:
                sampled.finish, sampled.stopped_by_string = FinishReason.STOP, True
                return
            if chunk.finish_reason is not None:
                sampled.finish = chunk.finish_reason
                return
    raise EngineUnavailableError("the engine's stream ended without a finish reason")


@asynccontextmanager
async def _closing(chunks: AsyncIterator[TokenChunk]) -> AsyncGenerator[AsyncIterator[TokenChunk]]:
    """Close the iterator whatever happens: that aborts the request in the engine."""
    try:
        yield chunks
    finally:
        close = getattr(chunks, "aclose", None)
        if close is not None:
            await close()
