"""OpenAI text completions: raw prompts, as text or as token ids."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

import msgspec

from stages.gateway.conversation import Answer, Call, Event, Requested, Text, new_answer_id
from stages.gateway.errors import GatewayError, InvalidRequestError
from stages.gateway.protocols.chat import positive, stop_strings
from stages.gateway.protocols.chat_stream import FINISH, usage
from stages.gateway.protocols.wire import PING_COMMENT, decode_body, not_served, openai_error, sse, to_json


class _StreamOptions(msgspec.Struct):
    include_usage: bool = False


class _Body(msgspec.Struct):
    prompt: str | list[str | int | list[int]]
    model: str = ""
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    n: int | None = None
    logprobs: int | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None


_decoder: Final = msgspec.json.Decoder(_Body)
_MAX_ID: Final = 2**31 - 1


def parse_completion(body: bytes) -> CompletionExchange:
    """A request's body.

    Raises:
        InvalidRequestError: it can't be used.
    """
    request = decode_body(_decoder, body)
    for name in ("echo", "suffix"):
        if getattr(request, name):
            raise not_served(name, "leave it out")
    if request.best_of is not None and request.best_of > (request.n or 1):
        raise not_served("best_of above n", "ask for n answers and choose among them")
    if request.logprobs not in (None, 0, 1):
        raise not_served(
            f"logprobs of {request.logprobs}", "engines tell the log-prob of the sampled token alone: send 0 or 1"
        )
    requested = Requested(
        max_tokens=positive(request.max_tokens) or 16,
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        min_p=request.min_p,
        presence_penalty=request.presence_penalty,
        frequency_penalty=request.frequency_penalty,
        repetition_penalty=request.repetition_penalty,
        logit_bias=request.logit_bias,
        seed=request.seed,
        stop=stop_strings(request.stop),
        n=positive(request.n) or 1,
        logprobs=request.logprobs is not None,
    )
    call = Call(
        protocol="completions",
        answer_id=new_answer_id("completions"),
        model=request.model,
        prompt=_prompt(request.prompt),
        requested=requested,
        stream=bool(request.stream),
    )
    return CompletionExchange(call, include_usage=bool(request.stream_options and request.stream_options.include_usage))


def _prompt(prompt: str | list[str | int | list[int]]) -> str | tuple[int, ...]:
    if isinstance(prompt, str):
        return prompt
    if len(prompt) == 1 and not isinstance(prompt[0], int):
        only = prompt[0]
        return only if isinstance(only, str) else _ids(only)
    ids = [one for one in prompt if isinstance(one, int)]
    if len(ids) != len(prompt):
        raise InvalidRequestError("prompt: expected one text or one list of ids, found several; send a call for each")
    return _ids(ids)


def _ids(ids: list[int]) -> tuple[int, ...]:
    wrong = next((one for one in ids if not 0 <= one <= _MAX_ID), None)
    if wrong is not None:
        raise InvalidRequestError(f"prompt: expected token ids in 0..{_MAX_ID}, found {wrong}")
    return tuple(ids)


class CompletionExchange:
    """One text completion."""

    def __init__(self, call: Call, *, include_usage: bool) -> None:
        self.call = call
        self._include_usage = include_usage
        self._created: Final = int(time.time())
        self._chosen = range(call.requested.n)

    def _body(self, choices: Sequence[object], **more: object) -> bytes:
        return to_json(
            {
                "id": self.call.answer_id,
                "object": "text_completion",
                "created": self._created,
                "model": self.call.model,
                "choices": choices,
                **more,
            }
        )

    def reply(self, answers: Sequence[Answer]) -> bytes:
        """The body of a non-streaming answer."""
        choices = [
            {
                "index": index,
                "text": answer.message.text,
                "finish_reason": FINISH[answer.finish],
                "logprobs": _logprobs(answer),
            }
            for index, answer in enumerate(answers)
        ]
        return self._body(choices, usage=usage(answers))

    def start(self) -> bytes:
        """Nothing: the first text is the first chunk."""
        return b""

    def events(self, choice: int, events: Sequence[Event]) -> bytes:
        """One chunk per piece of text."""
        return b"".join(
            sse(None, self._body([{"index": choice, "text": event.text, "finish_reason": None, "logprobs": None}]))
            for event in events
            if isinstance(event, Text)
        )

    def finish(self, answers: Sequence[Answer]) -> bytes:
        """Finish reasons, usage where asked for, the end mark."""
        chunks = [
            sse(
                None,
                self._body(
                    [
                        {
                            "index": index,
                            "text": "",
                            "finish_reason": FINISH[answer.finish],
                            "logprobs": _logprobs(answer),
                        }
                    ]
                ),
            )
            for index, answer in enumerate(answers)
        ]
        if self._include_usage:
            chunks.append(sse(None, self._body([], usage=usage(answers))))
        return b"".join(chunks) + b"data: [DONE]\n\n"

    def fail(self, error: GatewayError) -> bytes:
        """An error chunk: the SDK raises it."""
        return sse(None, to_json(openai_error(error)))

    def ping(self) -> bytes:
        """A comment."""
        return PING_COMMENT


def _logprobs(answer: Answer) -> dict[str, object] | None:
    if not answer.token_logprobs:
        return None
    return {
        "tokens": [text for text, _ in answer.token_logprobs],
        "token_logprobs": [logprob for _, logprob in answer.token_logprobs],
        "top_logprobs": None,
    }
