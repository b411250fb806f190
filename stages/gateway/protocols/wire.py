"""What all wire protocols share: the shape of an exchange, decoding of bodies, server-sent events, errors.

Knows no protocol's fields.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol, TypeVar

import msgspec

from stages.gateway.conversation import Answer, Call, Event, Protocol_, Tool
from stages.gateway.errors import ContextLengthExceededError, GatewayError, InvalidRequestError
from stages.gateway.settings import GatewayLimits

T = TypeVar("T")


class Exchange(Protocol):
    """One request and the way back: the call it asks for, and its answer in the protocol's own form."""

    call: Call

    def reply(self, answers: Sequence[Answer]) -> bytes:
        """The body of a non-streaming answer."""
        ...

    def start(self) -> bytes:
        """The first stream events."""
        ...

    def events(self, choice: int, events: Sequence[Event]) -> bytes:
        """More stream events; may be empty."""
        ...

    def finish(self, answers: Sequence[Answer]) -> bytes:
        """The last stream events."""
        ...

    def fail(self, error: GatewayError) -> bytes:
        """The stream events that end a stream which can't go on."""
        ...

    def ping(self) -> bytes:
        """Keeps a silent stream open."""
        ...


_encoder: Final = msgspec.json.Encoder()
_LARGE_BODY_BYTES: Final = 256 * 1024
_PIECES_PER_MESSAGE: Final = 40


def to_json(value: object) -> bytes:
    """JSON bytes."""
    return _encoder.encode(value)


def decode_body(decoder: msgspec.json.Decoder[T], body: bytes) -> T:
    """A request's body as its struct.

    Raises:
        InvalidRequestError: no JSON, bad UTF-8, nested too deeply, or a field of the wrong type.
    """
    try:
        return decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeError) as error:
        raise InvalidRequestError(f"the body can't be used: {error}") from error
    except RecursionError as error:
        raise InvalidRequestError("the body can't be used: it is nested too deeply") from error


def check_density(body: bytes, limits: GatewayLimits) -> None:
    """Refuse a large body of very many tiny pieces before each of them becomes an object in memory.

    Counts brackets in texts too: real histories, full of code, stay far below.
    """
    if len(body) <= _LARGE_BODY_BYTES:
        return
    most = _PIECES_PER_MESSAGE * limits.max_messages
    if body.count(b"{") > most or body.count(b"[") > most or body.count(b'"role"') > 2 * limits.max_messages:
        raise InvalidRequestError(
            f"messages: expected at most {limits.max_messages}, found many more pieces than they have"
        )


def check_size(num_messages: int, limits: GatewayLimits) -> None:
    """Refuse conversations with more messages than any real one has."""
    if num_messages > limits.max_messages:
        raise InvalidRequestError(f"messages: expected at most {limits.max_messages}, found {num_messages}")
    if num_messages == 0:
        raise InvalidRequestError("messages: expected at least one, found none")


def checked_tool(
    name: str, description: str | None, parameters: dict[str, object] | None, limits: GatewayLimits
) -> Tool:
    """A tool whose schema is no deeper than allowed."""
    if not name:
        raise InvalidRequestError("tools: expected a name, found an empty one")
    if parameters is not None and _deeper(parameters, limits.max_json_depth):
        raise InvalidRequestError(f"tools: the schema of {name!r} is nested deeper than {limits.max_json_depth}")
    return Tool(name=name, description=description, parameters=parameters)


def _deeper(value: object, levels: int) -> bool:
    if isinstance(value, dict):
        return levels == 0 or any(_deeper(one, levels - 1) for one in value.values())  # pyright: ignore[reportUnknownVariableType] - JSON
    if isinstance(value, list):
        return levels == 0 or any(_deeper(one, levels - 1) for one in value)  # pyright: ignore[reportUnknownVariableType] - JSON
    return False


def not_served(field: str, instead: str) -> InvalidRequestError:
    """The error for what is asked and would otherwise be passed over in silence."""
    return InvalidRequestError(f"{field}: not served; {instead}")


def check_format(field: str, kind: str) -> str:
    """A format of answers, if it is one that a policy gives by itself."""
    if kind != "text":
        raise not_served(
            f"{field} {kind!r}", "answers are sampled without constraints: ask for the format in the prompt"
        )
    return kind


def refuse_media(kind: str) -> InvalidRequestError:
    """The error for images, sound and files."""
    return InvalidRequestError(f"content of type {kind!r} can't be used: the policy reads text only")


def sse(event: str | None, data: bytes) -> bytes:
    """One server-sent event."""
    return b"data: %b\n\n" % data if event is None else b"event: %b\ndata: %b\n\n" % (event.encode(), data)


PING_EVENT: Final = b'event: ping\ndata: {"type":"ping"}\n\n'
"""An event, not a comment: Codex's idle timer is not reset by comments."""
PING_COMMENT: Final = b": ping\n\n"

_OPENAI_TYPES: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "request_timeout",
    429: "rate_limit_error",
}
_ANTHROPIC_TYPES: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def openai_error(error: GatewayError) -> dict[str, object]:
    """An error as OpenAI's APIs shape it."""
    status = error.http_status
    kind = _OPENAI_TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": error.message, "type": kind, "param": None, "code": error.code}}


def anthropic_error(error: GatewayError) -> dict[str, object]:
    """An error as Anthropic's API shapes it; `code` is ours, since its types are too coarse for a context overflow."""
    status = error.http_status
    kind = _ANTHROPIC_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": error.message, "code": error.code}}


def error_body(error: GatewayError, protocol: Protocol_ | None) -> bytes:
    """An error in a protocol's own shape; OpenAI's where no protocol is known."""
    return to_json(anthropic_error(error) if protocol == "messages" else openai_error(error))


def is_overflow(error: GatewayError) -> bool:
    """Whether the prompt did not fit."""
    return isinstance(error, ContextLengthExceededError)
