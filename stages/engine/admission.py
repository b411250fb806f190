"""What every engine, in this process or behind HTTP, checks before it takes a request up. Pure."""

from __future__ import annotations

from stages.ports import BadRequestError, ContextOverflowError, EngineUnavailableError, GenerateRequest


def check_request(request: GenerateRequest, *, vocab_size: int, max_context: int, version: int) -> None:
    """Refuse what can't be sampled.

    Raises:
        BadRequestError: Empty prompt, ids outside the vocabulary, or settings outside their range.
        ContextOverflowError: Prompt and completion don't fit together.
        EngineUnavailableError: The engine serves an older version than the request asks for.
    """
    ids, settings = request.prompt_ids, request.settings
    if not ids.size:
        raise BadRequestError("expected at least one prompt token, found none")
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= vocab_size:
        raise BadRequestError(f"expected token ids in 0..{vocab_size - 1}, found {low if low < 0 else high}")
    if settings.max_new_tokens < 1:
        raise BadRequestError(f"expected max_new_tokens of at least 1, found {settings.max_new_tokens}")
    if settings.temperature < 0 or not 0 < settings.top_p <= 1 or settings.top_k < 0:
        raise BadRequestError(
            "expected temperature >= 0, 0 < top_p <= 1 and top_k >= 0, found "
            f"{settings.temperature}, {settings.top_p}, {settings.top_k}"
        )
    if ids.size + settings.max_new_tokens > max_context:
        raise ContextOverflowError(
            f"{ids.size} prompt tokens and {settings.max_new_tokens} new ones exceed the context of {max_context}"
        )
    if version < request.min_version:
        raise EngineUnavailableError(f"expected weights of version {request.min_version} or newer, serving {version}")
