"""OpenAI chat completions: one exchange, its answer as one body or as chunks."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

from stages.gateway.conversation import Answer, Call, CallArguments, CallStarted, Event, Reasoning, Text
from stages.gateway.errors import GatewayError
from stages.gateway.protocols.wire import PING_COMMENT, openai_error, sse, to_json

FINISH: Final = {"stop": "stop", "stop_string": "stop", "length": "length", "tool_calls": "tool_calls"}


def usage(answers: Sequence[Answer]) -> dict[str, object]:
    """Token counts of a call with all its choices."""
    num_prompt = answers[0].num_prompt
    num_completion = sum(answer.num_completion for answer in answers)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_completion,
        "total_tokens": num_prompt + num_completion,
        "prompt_tokens_details": {"cached_tokens": answers[0].num_cached},
    }


def _logprobs(answer: Answer) -> dict[str, object] | None:
    if not answer.token_logprobs:
        return None
    return {
        "content": [
            {"token": text, "logprob": logprob, "bytes": list(text.encode("utf-8", "replace")), "top_logprobs": []}
            for text, logprob in answer.token_logprobs
        ],
        "refusal": None,
    }


class ChatExchange:
    """One chat completion."""

    def __init__(self, call: Call, *, include_usage: bool) -> None:
        self.call = call
        self._include_usage = include_usage
        self._created: Final = int(time.time())
        head = {"id": call.answer_id, "object": "chat.completion.chunk", "created": self._created, "model": call.model}
        self._head: Final = to_json(head)[:-1]

    def reply(self, answers: Sequence[Answer]) -> bytes:
        """The body of a non-streaming answer."""
        return to_json(
            {
                "id": self.call.answer_id,
                "object": "chat.completion",
                "created": self._created,
                "model": self.call.model,
                "choices": [self._choice(index, answer) for index, answer in enumerate(answers)],
                "usage": usage(answers),
            }
        )

    def _choice(self, index: int, answer: Answer) -> dict[str, object]:
        message = answer.message
        shaped: dict[str, object] = {"role": "assistant", "content": message.text or (None if message.calls else "")}
        if message.reasoning:
            shaped["reasoning_content"] = message.reasoning
        if message.calls:
            shaped["tool_calls"] = [
                {"id": one.id, "type": "function", "function": {"name": one.name, "arguments": one.arguments}}
                for one in message.calls
            ]
        return {
            "index": index,
            "message": shaped,
            "finish_reason": FINISH[answer.finish],
            "logprobs": _logprobs(answer),
        }

    def start(self) -> bytes:
        """Each choice begins with its role."""
        choices = range(self.call.requested.n)
        return b"".join(self._chunk(choice, b'{"role":"assistant","content":""}') for choice in choices)

    def events(self, choice: int, events: Sequence[Event]) -> bytes:
        """One chunk per event."""
        if len(events) == 1:
            return self._chunk(choice, _delta(events[0]))
        return b"".join(self._chunk(choice, _delta(event)) for event in events)

    def finish(self, answers: Sequence[Answer]) -> bytes:
        """Finish reasons, usage where asked for, the end mark."""
        chunks = [
            b'data: %b,"choices":[%b]}\n\n'
            % (
                self._head,
                to_json(
                    {"index": index, "delta": {}, "logprobs": _logprobs(answer), "finish_reason": FINISH[answer.finish]}
                ),
            )
            for index, answer in enumerate(answers)
        ]
        if self._include_usage:
            chunks.append(b'data: %b,"choices":[],"usage":%b}\n\n' % (self._head, to_json(usage(answers))))
        return b"".join(chunks) + b"data: [DONE]\n\n"

    def fail(self, error: GatewayError) -> bytes:
        """An error chunk: the SDK raises it."""
        return sse(None, to_json(openai_error(error)))

    def ping(self) -> bytes:
        """A comment: an unknown event would reach users as a chunk without choices."""
        return PING_COMMENT

    def _chunk(self, choice: int, delta: bytes) -> bytes:
        return b'data: %b,"choices":[{"index":%d,"delta":%b,"logprobs":null,"finish_reason":null}]}\n\n' % (
            self._head,
            choice,
            delta,
        )


def _delta(event: Event) -> bytes:
    match event:
        case Text(text):
            return b'{"content":%b}' % to_json(text)
        case Reasoning(text):
            return b'{"reasoning_content":%b}' % to_json(text)
        case CallStarted(index, call_id, name):
            function = {"name": name, "arguments": ""}
            return to_json({"tool_calls": [{"index": index, "id": call_id, "type": "function", "function": function}]})
        case CallArguments(index, text):
            return to_json({"tool_calls": [{"index": index, "function": {"arguments": text}}]})
