"""Which settings a call is sampled with, how long its answer may be, and whether it may be trained on. Pure."""

from __future__ import annotations

import msgspec

from stages.gateway.conversation import Requested
from stages.gateway.errors import ContextLengthExceededError
from stages.gateway.settings import OverridePolicy, RunSampling
from stages.ports import SamplingSettings


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """How a call is sampled."""

    settings: SamplingSettings
    untrainable_reason: str = ""
    """Why its tokens are masked in the loss: `greedy` or `settings`. Empty: they are trained."""


def decide_sampling(
    requested: Requested, run: RunSampling, *, num_prompt: int, context_length: int, stop_token_ids: tuple[int, ...]
) -> Decision:
    """The settings of one call.

    Raises:
        ContextLengthExceededError: not one token fits below the engine's context.
    """
    room = context_length - 1 - num_prompt
    if room < 1:
        raise ContextLengthExceededError(num_prompt + 1, context_length - 1)
    asked = requested.max_tokens if requested.max_tokens is not None else run.max_new_tokens
    honour = run.policy is OverridePolicy.HONOUR
    temperature = requested.temperature if honour and requested.temperature is not None else run.temperature
    top_p = requested.top_p if honour and requested.top_p is not None else run.top_p
    top_k = requested.top_k if honour and requested.top_k is not None else run.top_k
    settings = SamplingSettings(
        temperature=temperature,
        top_p=top_p,
        top_k=max(top_k, 0),
        max_new_tokens=max(1, min(asked, run.max_new_tokens, room)),
        stop_token_ids=stop_token_ids,
        # A harness that fixes a seed would make all members of a group sample the same answer.
        seed=requested.seed if honour else None,
    )
    reason = _untrainable(settings, run)
    if not reason and honour and _asks_more(requested):
        reason = "settings"
    return Decision(settings=settings, untrainable_reason=reason)


def _asks_more(requested: Requested) -> bool:
    """Whether the harness wants another distribution by settings that engines are not given."""
    penalties = (requested.presence_penalty, requested.frequency_penalty, requested.min_p)
    repetition = requested.repetition_penalty not in (None, 1)
    return any(penalties) or repetition or bool(requested.logit_bias)


def _untrainable(settings: SamplingSettings, run: RunSampling) -> str:
    if settings.temperature <= 0 or settings.top_k == 1:
        return "greedy"
    if settings.top_p < 1 or settings.top_k > 0 or settings.temperature != run.temperature or settings.seed is not None:
        return "settings"
    return ""


def remaining_budget(*, max_response: int, max_context: int, num_prompt: int, num_generated: int) -> int:
    """Tokens that may still be sampled after an interruption: never the full budget again.

    `num_prompt` counts the first prompt, `num_generated` what was sampled since; one token of the context stays free.
    """
    return max(0, min(max_response - num_generated, max_context - 1 - num_prompt - num_generated))
