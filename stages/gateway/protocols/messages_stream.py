"""Anthropic messages: one exchange. Blocks never overlap; each has one start, at least one delta, one stop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from stages.gateway.conversation import Answer, Call, CallArguments, CallStarted, Event, Reasoning, Text
from stages.gateway.errors import GatewayError
from stages.gateway.protocols.messages import STOP_REASONS, answer_blocks, signature, usage
from stages.gateway.protocols.wire import PING_EVENT, anthropic_error, sse, to_json

_EMPTY_USAGE: Final = {
    "input_tokens": 0,
    "cache_creation_input_tokens": 0,
    "cache_read_input_tokens": 0,
    "output_tokens": 0,
}


class MessagesExchange:
    """One message."""

    def __init__(self, call: Call) -> None:
        self.call = call
        self._blocks = BlockStream()

    def _message(
        self, content: Sequence[object], stop: str | None, sequence: str | None, counts: object
    ) -> dict[str, object]:
        return {
            "id": self.call.answer_id,
            "type": "message",
            "role": "assistant",
            "model": self.call.model,
            "content": content,
            "stop_reason": stop,
            "stop_sequence": sequence,
            "usage": counts,
        }

    def reply(self, answers: Sequence[Answer]) -> bytes:
        """The body of a non-streaming answer."""
        answer = answers[0]
        return to_json(
            self._message(answer_blocks(answer), STOP_REASONS[answer.finish], answer.stop_string, usage(answer))
        )

    def start(self) -> bytes:
        """The message without content."""
        message = self._message([], None, None, _EMPTY_USAGE)
        return sse("message_start", to_json({"type": "message_start", "message": message}))

    def events(self, choice: int, events: Sequence[Event]) -> bytes:
        """Block starts, deltas and stops."""
        del choice  # the protocol has one
        return b"".join(self._blocks.take(event) for event in events)

    def finish(self, answers: Sequence[Answer]) -> bytes:
        """The last block's end, stop reason, usage."""
        answer = answers[0]
        delta = {"stop_reason": STOP_REASONS[answer.finish], "stop_sequence": answer.stop_string}
        return (
            self._blocks.close()
            + sse("message_delta", to_json({"type": "message_delta", "delta": delta, "usage": usage(answer)}))
            + b'event: message_stop\ndata: {"type":"message_stop"}\n\n'
        )

    def fail(self, error: GatewayError) -> bytes:
        """An error event."""
        return sse("error", to_json(anthropic_error(error)))

    def ping(self) -> bytes:
        """A ping event."""
        return PING_EVENT


class BlockStream:
    """Events to content blocks with indices 0, 1, 2, …, without overlap."""

    def __init__(self) -> None:
        self._index = -1
        self._open: str = ""
        """thinking | text | tool_use, or nothing."""
        self._reasoning: list[str] = []
        self._empty = True

    def take(self, event: Event) -> bytes:
        """The stream events of one event."""
        match event:
            case Text(text):
                return self._enter("text", {"type": "text", "text": ""}) + self._delta("text_delta", "text", text)
            case Reasoning(text):
                opened = self._enter("thinking", {"type": "thinking", "thinking": "", "signature": ""})
                self._reasoning.append(text)
                return opened + self._delta("thinking_delta", "thinking", text)
            case CallStarted(_, call_id, name):
                block: dict[str, object] = {"type": "tool_use", "id": call_id, "name": name, "input": {}}
                return self.close() + self._enter("tool_use", block)
            case CallArguments(_, text):
                return self._delta("input_json_delta", "partial_json", text)

    def close(self) -> bytes:
        """End the open block, if there is one."""
        if not self._open:
            return b""
        last = b""
        if self._open == "thinking":
            last = self._delta("signature_delta", "signature", signature("".join(self._reasoning)))
            self._reasoning.clear()
        elif self._empty:
            last = self._delta("input_json_delta", "partial_json", "{}")
        self._open = ""
        return last + b'event: content_block_stop\ndata: {"type":"content_block_stop","index":%d}\n\n' % self._index

    def _enter(self, kind: str, block: dict[str, object]) -> bytes:
        if self._open == kind and kind != "tool_use":
            return b""
        closed = self.close()
        self._index += 1
        self._open, self._empty = kind, True
        start = {"type": "content_block_start", "index": self._index, "content_block": block}
        return closed + sse("content_block_start", to_json(start))

    def _delta(self, kind: str, key: str, text: str) -> bytes:
        self._empty = False
        return (
            b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,"delta":{"type":"%b","%b":%b}}\n\n'
            % (
                self._index,
                kind.encode(),
                key.encode(),
                to_json(text),
            )
        )
