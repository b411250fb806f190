"""OpenAI responses: one exchange. Codex acts on `response.output_item.done` and `response.completed` alone; the SDK reads the rest."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from stages.gateway.conversation import (
    Answer,
    CallArguments,
    CallStarted,
    Event,
    Message,
    Reasoning,
    Text,
    ToolCall,
)
from stages.gateway.errors import ContextLengthExceededError, GatewayError
from stages.gateway.protocols.responses import ResponsesRequest, ToolName, free_form_input, seal
from stages.gateway.protocols.wire import PING_EVENT, sse, to_json

Remember = Callable[[str, tuple[Message, ...]], None]
"""Keeps a conversation for previous_response_id."""


class ResponsesExchange:
    """One response."""

    def __init__(self, request: ResponsesRequest, remember: Remember) -> None:
        self.call = request.call
        self._request = request
        self._remember = remember
        self._created = int(time.time())
        self._number = 0
        self._items = _Items(request, self._event)

    def reply(self, answers: Sequence[Answer]) -> bytes:
        """The body of a non-streaming answer."""
        answer = answers[0]
        for event in _as_events(answer):
            self._items.take(event)
        self._items.close()
        return to_json(self._ended(answer))

    def start(self) -> bytes:
        """The response without output."""
        response = self._response("in_progress", [], None)
        return self._event("response.created", {"response": response}) + self._event(
            "response.in_progress", {"response": response}
        )

    def events(self, choice: int, events: Sequence[Event]) -> bytes:
        """Item starts, deltas and ends."""
        del choice  # the protocol has one
        return b"".join(self._items.take(event) for event in events)

    def finish(self, answers: Sequence[Answer]) -> bytes:
        """The last item's end and the whole response."""
        last = self._items.close()
        ended = self._ended(answers[0])
        return last + self._event(f"response.{ended['status']}", {"response": ended})

    def fail(self, error: GatewayError) -> bytes:
        """response.failed, which names a context overflow as Codex expects it."""
        code = error.code if isinstance(error, ContextLengthExceededError) else "server_error"
        response = self._response("failed", self._items.done, None)
        response["error"] = {"code": code, "message": error.message}
        return self._event("response.failed", {"response": response})

    def ping(self) -> bytes:
        """A ping event."""
        return PING_EVENT

    def _ended(self, answer: Answer) -> dict[str, object]:
        if self._request.store:
            self._remember(self.call.answer_id, (*self.call.messages, answer.message))
        cut = answer.finish == "length"
        response = self._response("incomplete" if cut else "completed", self._items.done, _usage(answer))
        if cut:
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        return response

    def _response(self, status: str, output: Sequence[object], usage: object) -> dict[str, object]:
        requested = self.call.requested
        return {
            "id": self.call.answer_id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "instructions": self._request.instructions,
            "metadata": {},
            "model": self.call.model,
            "output": list(output),
            "parallel_tool_calls": requested.parallel_tool_calls is not False,
            "previous_response_id": self._request.previous,
            "store": self._request.store,
            "temperature": requested.temperature,
            "tool_choice": "auto",
            "tools": [],
            "top_p": requested.top_p,
            "usage": usage,
        }

    def _event(self, kind: str, fields: dict[str, object]) -> bytes:
        event = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        return sse(kind, to_json(event))


class _Items:
    """Events to output items, one open at a time."""

    def __init__(self, request: ResponsesRequest, event: Callable[[str, dict[str, object]], bytes]) -> None:
        self._request = request
        self._event = event
        self._open = ""
        """reasoning | message | call, or nothing."""
        self._text: list[str] = []
        self._started: CallStarted | None = None
        self.done: list[dict[str, object]] = []

    def take(self, event: Event) -> bytes:
        match event:
            case Reasoning(text):
                begun = b"" if self._open == "reasoning" else self.close() + self._begin_reasoning()
                self._text.append(text)
                return begun + self._send("reasoning_summary_text.delta", summary_index=0, delta=text)
            case Text(text):
                begun = b"" if self._open == "message" else self.close() + self._begin_message()
                self._text.append(text)
                return begun + self._send("output_text.delta", content_index=0, delta=text, logprobs=[])
            case CallStarted():
                closed = self.close()
                self._open, self._started = "call", event
                return closed + self._added(self._call_item(event, "", "in_progress"))
            case CallArguments(_, text):
                self._text.append(text)
                if self._name().kind == "custom":
                    return b""
                return self._send("function_call_arguments.delta", delta=text)

    def close(self) -> bytes:
        """End the open item, if there is one."""
        text = "".join(self._text)
        self._text.clear()
        kind, self._open = self._open, ""
        match kind:
            case "reasoning":
                return self._end_reasoning(text)
            case "message":
                return self._end_message(text)
            case "call":
                return self._end_call(text)
            case _:
                return b""

    @property
    def _id(self) -> str:
        prefix = {"reasoning": "rs", "message": "msg"}.get(self._open, "fc")
        return self._item_id(prefix)

    def _item_id(self, prefix: str) -> str:
        return f"{prefix}_{self._request.call.answer_id.removeprefix('resp_')}_{len(self.done)}"

    def _send(self, kind: str, **fields: object) -> bytes:
        return self._event(f"response.{kind}", {"item_id": self._id, "output_index": len(self.done), **fields})

    def _added(self, item: dict[str, object]) -> bytes:
        return self._event("response.output_item.added", {"output_index": len(self.done), "item": item})

    def _done(self, item: dict[str, object]) -> bytes:
        event = self._event("response.output_item.done", {"output_index": len(self.done), "item": item})
        self.done.append(item)
        return event

    def _begin_reasoning(self) -> bytes:
        self._open = "reasoning"
        item: dict[str, object] = {"id": self._id, "type": "reasoning", "summary": []}
        return self._added(item) + self._send(
            "reasoning_summary_part.added", summary_index=0, part={"type": "summary_text", "text": ""}
        )

    def _end_reasoning(self, text: str) -> bytes:
        self._open = "reasoning"
        part = {"type": "summary_text", "text": text}
        item: dict[str, object] = {"id": self._id, "type": "reasoning", "summary": [part]}
        if self._request.sealed:
            item["encrypted_content"] = seal(text)
        ended = self._send("reasoning_summary_text.done", summary_index=0, text=text) + self._send(
            "reasoning_summary_part.done", summary_index=0, part=part
        )
        self._open = ""
        return ended + self._done(item)

    def _begin_message(self) -> bytes:
        self._open = "message"
        return self._added(
            {"id": self._id, "type": "message", "status": "in_progress", "role": "assistant", "content": []}
        ) + self._send("content_part.added", content_index=0, part=_output_text(""))

    def _end_message(self, text: str) -> bytes:
        self._open = "message"
        item: dict[str, object] = {
            "id": self._id,
            "type": "message",
            "status": "completed",
            "role": "assistant",
            "content": [_output_text(text)],
        }
        ended = self._send("output_text.done", content_index=0, text=text, logprobs=[]) + self._send(
            "content_part.done", content_index=0, part=_output_text(text)
        )
        self._open = ""
        return ended + self._done(item)

    def _end_call(self, text: str) -> bytes:
        started, self._started = self._started, None
        if started is None:
            return b""
        self._open = "call"
        item = self._call_item(started, text or "{}", "completed")
        if item["type"] == "custom_tool_call":
            ended = self._send("custom_tool_call_input.delta", delta=item["input"]) + self._send(
                "custom_tool_call_input.done", input=item["input"]
            )
        else:
            ended = self._send("function_call_arguments.done", arguments=text or "{}")
        self._open = ""
        return ended + self._done(item)

    def _name(self) -> ToolName:
        name = self._started.name if self._started else ""
        return self._request.names.get(name, ToolName("function", name))

    def _call_item(self, started: CallStarted, arguments: str, status: str) -> dict[str, object]:
        known = self._request.names.get(started.name, ToolName("function", started.name))
        item: dict[str, object] = {
            "id": self._item_id("fc"),
            "status": status,
            "call_id": started.id,
            "name": known.name,
        }
        if known.kind == "custom":
            call = ToolCall(id=started.id, name=started.name, arguments=arguments)
            return {**item, "type": "custom_tool_call", "input": free_form_input(call) if arguments else ""}
        if known.namespace is not None:
            item["namespace"] = known.namespace
        return {**item, "type": "function_call", "arguments": arguments}


def _output_text(text: str) -> dict[str, object]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _as_events(answer: Answer) -> list[Event]:
    events: list[Event] = []
    for kind, value in answer.segments:
        match kind:
            case "reasoning":
                events.append(Reasoning(value))
            case "text":
                events.append(Text(value))
            case _:
                call = answer.message.calls[int(value)]
                events += [CallStarted(int(value), call.id, call.name), CallArguments(int(value), call.arguments)]
    return events


def _usage(answer: Answer) -> dict[str, object]:
    return {
        "input_tokens": answer.num_prompt,
        "input_tokens_details": {"cached_tokens": answer.num_cached},
        "output_tokens": answer.num_completion,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": answer.num_prompt + answer.num_completion,
    }
