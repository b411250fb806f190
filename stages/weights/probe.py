"""One greedy token of an engine: does it answer, and with the weights that it says it has?"""

from __future__ import annotations

import math
import secrets

import anyio
import numpy as np
import structlog

from schemas.messages.rollout import FinishReason
from stages.ports import EngineError, GenerateRequest, InferenceEngine, SamplingSettings

log = structlog.get_logger("headrace.weights")


class ProbeError(Exception):
    """The engine doesn't answer as it should with its new weights."""


async def probe(engine: InferenceEngine, version: int, *, deadline_s: float) -> None:
    """Sample one token with the weights of `version`.

    An engine that is too busy to answer in time, but is ready and at that version, passes: its requests wait in a queue
    that the probe joined last.

    Raises:
        ProbeError: an error, no token, another version, or a log-prob that is no number.
    """
    request = GenerateRequest(
        request_id=f"probe-{version}-{secrets.token_hex(4)}",
        prompt_ids=np.zeros(1, dtype=np.int32),
        settings=SamplingSettings(temperature=0.0, max_new_tokens=1, seed=0),
        min_version=version,
    )
    try:
        with anyio.move_on_after(deadline_s) as waiting:
            await _sample(engine, request)
        if waiting.cancelled_caught:
            await _excuse(engine, version, deadline_s)
    except EngineError as error:
        raise ProbeError(f"a probe of version {version} failed: {error}") from error


async def _sample(engine: InferenceEngine, request: GenerateRequest) -> None:
    num_tokens, finish = 0, None
    async for chunk in engine.generate(request):
        finish = chunk.finish_reason
        if not len(chunk.token_ids):
            continue
        num_tokens += len(chunk.token_ids)
        if chunk.version != request.min_version:
            raise ProbeError(f"a probe expected a token of version {request.min_version}, found one of {chunk.version}")
        if not all(math.isfinite(float(logprob)) for logprob in chunk.logprobs):
            raise ProbeError(f"a probe of version {request.min_version} was answered with log-probs {chunk.logprobs}")
    if not num_tokens and finish is not FinishReason.STOP:
        raise ProbeError(f"a probe of version {request.min_version} was answered without a token (finish: {finish})")


async def _excuse(engine: InferenceEngine, version: int, deadline_s: float) -> None:
    health = await engine.health()
    if not health.ready or health.version != version or not health.num_running + health.num_waiting:
        raise ProbeError(
            f"a probe of version {version} was not answered within {deadline_s} s (ready: {health.ready}, version "
            f"{health.version}, {health.num_running} running, {health.num_waiting} waiting {health.detail})"
        )
    log.info("the engine is too busy for a probe", version=version, running=health.num_running)
