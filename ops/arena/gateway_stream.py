"""Converts a streamed chat completion into the events of the other protocols, chunk by chunk. Pure state machines."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import msgspec

from ops.arena.gateway_convert import (
    STOP_REASONS,
    call_item,
    error_body,
    message_item,
    messages_usage,
    responses_usage,
)
from ops.arena.gateway_wire import ChatCompletion, ChatToolCall, ErrorDetail, Json


class StreamConverter(Protocol):
    """Turns chunks into the events of one protocol."""

    def feed(self, chunk: ChatCompletion) -> Iterator[bytes]:
        """Events that follow from one chunk."""
        ...

    def end(self) -> Iterator[bytes]:
        """Events that end the stream."""
        ...

    def fail(self, detail: ErrorDetail) -> Iterator[bytes]:
        """Events that end the stream with an error."""
        ...

    def ping(self) -> bytes:
        """An event that keeps the connection alive."""
        ...


def sse(event: str, data: Json) -> bytes:
    """One server-sent event."""
    return f"event: {event}\n".encode() + b"data: " + msgspec.json.encode(data) + b"\n\n"


class MessagesStream:
    """Chat chunks → Anthropic message events."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._started = False
        self._block: tuple[str, int] | None = None
        self._next = 0
        self._stop = "end_turn"
        self._usage: Json = {"input_tokens": 0, "output_tokens": 0}

    def feed(self, chunk: ChatCompletion) -> Iterator[bytes]:
        """Events that follow from one chunk."""
        yield from self._start(chunk.id)
        if chunk.usage is not None:
            self._usage = messages_usage(chunk)
        for choice in chunk.choices[:1]:
            delta = choice.delta
            if delta.reasoning_content:
                block: Json = {"type": "thinking", "thinking": "", "signature": ""}
                yield from self._open("thinking", -1, block)
                yield self._delta({"type": "thinking_delta", "thinking": delta.reasoning_content})
            if delta.content:
                yield from self._open("text", -1, {"type": "text", "text": ""})
                yield self._delta({"type": "text_delta", "text": delta.content})
            for call in delta.tool_calls or []:
                yield from self._tool(call)
            if choice.finish_reason:
                self._stop = STOP_REASONS.get(choice.finish_reason, "end_turn")

    def end(self) -> Iterator[bytes]:
        """Close the open block and the message."""
        yield from self._start("")
        yield from self._close()
        stop: Json = {"stop_reason": self._stop, "stop_sequence": None}
        yield sse("message_delta", {"type": "message_delta", "delta": stop, "usage": self._usage})
        yield sse("message_stop", {"type": "message_stop"})

    def fail(self, detail: ErrorDetail) -> Iterator[bytes]:
        """An error event."""
        yield sse("error", error_body("messages", 500, detail))

    def ping(self) -> bytes:
        """A ping event."""
        return sse("ping", {"type": "ping"})

    def _start(self, answer_id: str) -> Iterator[bytes]:
        if self._started:
            return
        self._started = True
        message: Json = {
            "id": f"msg_{answer_id}",
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": self._usage,
        }
        yield sse("message_start", {"type": "message_start", "message": message})

    def _open(self, kind: str, call_index: int, block: Json) -> Iterator[bytes]:
        if self._block == (kind, call_index):
            return
        yield from self._close()
        self._block = (kind, call_index)
        yield sse("content_block_start", {"type": "content_block_start", "index": self._next, "content_block": block})

    def _close(self) -> Iterator[bytes]:
        if self._block is None:
            return
        self._block = None
        yield sse("content_block_stop", {"type": "content_block_stop", "index": self._next})
        self._next += 1

    def _delta(self, delta: Json) -> bytes:
        return sse("content_block_delta", {"type": "content_block_delta", "index": self._next, "delta": delta})

    def _tool(self, call: ChatToolCall) -> Iterator[bytes]:
        block: Json = {"type": "tool_use", "id": call.id or "", "name": call.function.name or "", "input": {}}
        yield from self._open("tool_use", call.index, block)
        if call.function.arguments:
            yield self._delta({"type": "input_json_delta", "partial_json": call.function.arguments})


class ResponsesStream:
    """Chat chunks → Responses events."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._id = ""
        self._text: list[str] = []
        self._calls: dict[int, tuple[str, str, list[str]]] = {}
        self._finish = "stop"
        self._usage: Json = responses_usage(ChatCompletion())

    def feed(self, chunk: ChatCompletion) -> Iterator[bytes]:
        """Events that follow from one chunk."""
        yield from self._start(chunk.id)
        if chunk.usage is not None:
            self._usage = responses_usage(chunk)
        for choice in chunk.choices[:1]:
            if choice.delta.content:
                yield from self._text_delta(choice.delta.content)
            for call in choice.delta.tool_calls or []:
                known = self._calls.setdefault(call.index, (call.id or "", call.function.name or "", []))
                known[2].append(call.function.arguments or "")
            self._finish = choice.finish_reason or self._finish

    def end(self) -> Iterator[bytes]:
        """Whole items, then the completed response."""
        yield from self._start("")
        output: list[Json] = []
        if self._text:
            output.append(message_item(f"msg_{self._id}", "".join(self._text)))
        output.extend(call_item(call_id, name, "".join(parts)) for call_id, name, parts in self._calls.values())
        for index, item in enumerate(output):
            event = "response.output_item.done"
            yield sse(event, {"type": event, "output_index": index, "item": item})
        kind = "response.incomplete" if self._finish == "length" else "response.completed"
        response = self._response("incomplete" if self._finish == "length" else "completed")
        response |= {"output": output, "usage": self._usage}
        yield sse(kind, {"type": kind, "response": response})

    def fail(self, detail: ErrorDetail) -> Iterator[bytes]:
        """A failed response."""
        response = self._response("failed")
        response["error"] = {"code": detail.code or "server_error", "message": detail.message}
        yield sse("response.failed", {"type": "response.failed", "response": response})

    def ping(self) -> bytes:
        """A ping event: clients of this protocol count data events only."""
        return sse("ping", {"type": "ping"})

    def _start(self, answer_id: str) -> Iterator[bytes]:
        if self._id:
            return
        self._id = answer_id or "empty"
        yield sse("response.created", {"type": "response.created", "response": self._response("in_progress")})

    def _text_delta(self, text: str) -> Iterator[bytes]:
        if not self._text:
            item = message_item(f"msg_{self._id}", "") | {"status": "in_progress", "content": []}
            event = "response.output_item.added"
            yield sse(event, {"type": event, "output_index": 0, "item": item})
        self._text.append(text)
        place: Json = {"item_id": f"msg_{self._id}", "output_index": 0, "content_index": 0}
        yield sse("response.output_text.delta", {"type": "response.output_text.delta", **place, "delta": text})

    def _response(self, status: str) -> Json:
        return {
            "id": f"resp_{self._id}",
            "object": "response",
            "model": self._model,
            "status": status,
            "error": None,
            "output": [],
        }
