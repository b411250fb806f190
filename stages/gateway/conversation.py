"""The internal form of a call: what every protocol is parsed into and what prompts are rendered from.

It keeps all that the model sees and nothing else (no cache marks, no client metadata). It knows no protocol and no tokens.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from typing import Final, Literal

import msgspec

Role = Literal["system", "user", "assistant", "tool"]
Protocol_ = Literal["chat_completions", "completions", "responses", "messages"]

SYSTEM_JOIN: Final = "\n\n"
"""Between system texts that become one message. Free to choose, but the same on every turn: the prompt must stay a prefix."""
PART_JOIN: Final = "\n"
"""Between the text parts of one message, as the engines' own servers flatten them."""


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call of a tool by the model."""

    id: str
    name: str
    arguments: str
    """JSON text of an object, as it was sampled or sent."""


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """One message of a conversation."""

    role: Role
    texts: tuple[str, ...] = ()
    """Text parts in order."""
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()
    call_id: str = ""
    """role tool: the call that this is the result of."""
    is_error: bool = False
    """role tool: what the client said; the template has no such field, so the text stays unchanged."""

    @property
    def text(self) -> str:
        """The message's text as the template gets it. An assistant's parts are pieces of one sampled text."""
        if len(self.texts) == 1:
            return self.texts[0]
        return ("" if self.role == "assistant" else PART_JOIN).join(self.texts)


class Tool(msgspec.Struct, frozen=True, kw_only=True):
    """A function that the model may call."""

    name: str
    description: str | None = None
    parameters: dict[str, object] | None = None
    """JSON schema of the arguments."""


class Requested(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the harness asked for: recorded as it is, overridden by the run's settings where those rule."""

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
    stop: tuple[str, ...] = ()
    n: int = 1
    logprobs: bool = False
    tool_choice: str | None = None
    """auto | none | required | the name of a tool. The policy is not forced: that would change what it samples from."""
    allowed_tools: tuple[str, ...] | None = None
    """Names of the tools that an answer is read for calls of; None: all."""
    parallel_tool_calls: bool | None = None
    response_format: str | None = None


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """One request to sample."""

    protocol: Protocol_
    answer_id: str = ""
    """The id that the client will see, fresh for each call: Claude Code merges answers of one id."""
    model: str = ""
    messages: tuple[Message, ...] = ()
    tools: tuple[Tool, ...] = ()
    outer_system: tuple[str, ...] = ()
    """System texts that stand outside the messages; `messages` begins with them unless some were skipped."""
    num_last: int = 0
    """How many of `messages` the body's last element made; 0 where that is not known."""
    skipped: int = 0
    """Messages before `messages` that were not parsed again: see `shortcuts`."""
    known: bytes = b""
    """Digest of the skipped messages."""
    prompt: str | tuple[int, ...] | None = None
    """completions: a raw text, or ids, instead of messages."""
    requested: Requested = Requested()
    stream: bool = False


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What one call sampled, parsed: the concatenation of its stream's events."""

    message: Message
    segments: tuple[tuple[str, str], ...] = ()
    """In order of sampling: ("reasoning" | "text", the text) or ("call", index into message.calls)."""
    finish: str
    """stop | length | tool_calls | stop_string"""
    stop_string: str | None = None
    num_prompt: int
    """Tokens of the whole prompt."""
    num_cached: int = 0
    """Tokens of the prompt that were reused from the recorded chain."""
    num_completion: int
    interaction_id: str
    token_logprobs: tuple[tuple[str, float], ...] = ()
    """(text of the token, log-prob), only where the client asked for log-probs."""


class Reasoning(msgspec.Struct, frozen=True):
    """Stream event: more reasoning."""

    text: str


class Text(msgspec.Struct, frozen=True):
    """Stream event: more text."""

    text: str


class CallStarted(msgspec.Struct, frozen=True):
    """Stream event: the model calls a tool."""

    index: int
    id: str
    name: str


class CallArguments(msgspec.Struct, frozen=True):
    """Stream event: more of a call's arguments (JSON text)."""

    index: int
    text: str


Event = Reasoning | Text | CallStarted | CallArguments


_ID_PREFIXES: Final[dict[Protocol_, tuple[str, str]]] = {
    "chat_completions": ("chatcmpl-", "call_"),
    "completions": ("cmpl-", "call_"),
    "responses": ("resp_", "call_"),
    "messages": ("msg_", "toolu_"),
}


def new_answer_id(protocol: Protocol_) -> str:
    """A fresh id for an answer."""
    return _ID_PREFIXES[protocol][0] + secrets.token_hex(12)


def new_call_id(protocol: Protocol_) -> str:
    """A fresh id for a tool call: clients drop calls whose id was used before."""
    return _ID_PREFIXES[protocol][1] + secrets.token_hex(12)


def gather_system(messages: Iterable[Message], *, answered: bool = False) -> tuple[Message, ...]:
    """One system message at the front.

    System texts before the model's first answer are joined there. Later ones stand where they came, as a user's message: moving
    them to the front would change the prompt that was already sampled from, and many templates refuse them in the middle.

    Args:
        answered: the messages go on after an answer.
    """
    front: list[str] = []
    rest: list[Message] = []
    for message in messages:
        answered = answered or message.role == "assistant"
        if message.role != "system":
            rest.append(message)
        elif answered:
            rest.append(Message(role="user", texts=message.texts))
        elif message.text:
            front.append(message.text)
    if not front:
        return tuple(rest)
    return (Message(role="system", texts=(SYSTEM_JOIN.join(front),)), *rest)
