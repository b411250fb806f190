"""Sampled text to reasoning, text and tool calls, piece by piece.

One port, `OutputParser`; whatever the chunking, the concatenation of the events is the same. A call is held back until it is whole, since
only then is it known to be one: what turns out malformed becomes text. Holds text, never ids.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from typing import Final, Protocol

import msgspec

from stages.gateway.conversation import CallArguments, CallStarted, Event, Reasoning, Text, Tool
from stages.gateway.matching import parse_object
from stages.gateway.settings import ToolFormat

_THINK: Final = "<think>"
_THINK_END: Final = "</think>"
_CALL: Final = "<tool_call>"
_CALL_END: Final = "</tool_call>"
_BLANKS: Final = " \t\r\n"
_LONGEST_TAG: Final = len(_CALL_END)

ParsedCall = tuple[str, str]
"""Name and arguments (JSON text of an object)."""


class CallFormat(Protocol):
    """How calls are written between the tags."""

    def read(self, body: str, tools: Mapping[str, Tool]) -> ParsedCall | None:
        """The call that a whole body is, or None."""
        ...

    def goes_on(self, body: str) -> bool:
        """Whether a body that is no call breaks off inside a value: then the closing tag just seen is part of it."""
        ...


class OutputParser(Protocol):
    """Turns the text of one answer into events."""

    def feed(self, text: str) -> list[Event]:
        """More text. What can't be judged yet is held back."""
        ...

    def finish(self) -> list[Event]:
        """No more text: whatever was held back."""
        ...


def output_parser(
    form: ToolFormat,
    *,
    tools: Mapping[str, Tool],
    reasoning: bool,
    opened: bool,
    new_call_id: Callable[[], str],
    allowed: Collection[str] | None = None,
) -> OutputParser:
    """The parser of one answer.

    Args:
        allowed: names of the tools whose calls are calls; those of others stay text. None: all.
        opened: the prompt itself ends inside <think>, as some templates' generation prompts do.
        new_call_id: a fresh id for each tool call.
    """
    formats: dict[ToolFormat, CallFormat] = {ToolFormat.HERMES: Hermes(), ToolFormat.QWEN3_CODER: Coder()}
    return TaggedParser(
        calls=formats.get(form) if tools else None,
        tools=tools,
        allowed=allowed,
        reasoning=reasoning,
        opened=opened,
        new_call_id=new_call_id,
    )


class TaggedParser:
    """Answers with <think> and <tool_call> tags."""

    def __init__(
        self,
        *,
        calls: CallFormat | None,
        tools: Mapping[str, Tool],
        reasoning: bool,
        opened: bool,
        new_call_id: Callable[[], str],
        allowed: Collection[str] | None = None,
    ) -> None:
        self._calls = calls
        self._tools = tools
        self._allowed = allowed
        self._new_call_id = new_call_id
        self._openers = tuple(tag for tag, used in ((_THINK, reasoning), (_CALL, calls is not None)) if used)
        self._held = ""
        self._searched = 0
        """Characters of `_held` in which the closing tag can't start."""
        self._inside = _THINK if opened and reasoning else ""
        self._blanks = ""
        """Blanks before a call: dropped with a call, kept when it turns out to be text."""
        self._skip_newlines = opened and reasoning
        self._num_calls = 0

    def feed(self, text: str) -> list[Event]:
        """More text."""
        plain = text and "<" not in text and text[-1] not in _BLANKS
        if plain and not (self._held or self._inside or self._skip_newlines):
            return [Text(text)]  # the usual case of a stream: nothing is held and nothing begins
        self._held += text
        events: list[Event] = []
        while self._step(events):
            pass
        return events

    def finish(self) -> list[Event]:
        """The end of the answer."""
        inside, held = self._inside, self._held
        self._held = ""
        if inside == _THINK:
            return _pieces(Reasoning, held)
        if inside == _CALL:
            call = self._read(held)
            return self._call_events(call) if call else _pieces(Text, self._blanks + _CALL + held)
        return _pieces(Text, self._unskipped(held))

    def _step(self, events: list[Event]) -> bool:
        """Consume one tag or everything that may go; whether there may be more to do."""
        if self._inside == _THINK:
            return self._in_reasoning(events)
        if self._inside == _CALL:
            return self._in_call(events)
        return self._in_text(events)

    def _in_text(self, events: list[Event]) -> bool:
        self._held = self._unskipped(self._held)
        found: tuple[int, str] | None = None
        if "<" in self._held:
            found = min(((at, tag) for tag in self._openers if (at := self._held.find(tag)) >= 0), default=None)
        if found is None:
            keep = len(self._held) - _undecided(self._held, self._openers) if self._openers else len(self._held)
            events += _pieces(Text, self._held[:keep])
            self._held = self._held[keep:]
            return False
        at, tag = found
        before = self._held[:at]
        kept = before.rstrip() if tag == _CALL else before
        self._blanks = before[len(kept) :]
        events += _pieces(Text, kept)
        self._enter(tag, self._held[at + len(tag) :])
        return True

    def _in_reasoning(self, events: list[Event]) -> bool:
        if self._skip_newlines:
            self._held = self._held.lstrip("\n")
            self._skip_newlines = not self._held
        at = self._held.find(_THINK_END)
        if at < 0:
            keep = len(self._held) - _undecided(self._held, (_THINK_END,), blanks="\n")
            events += _pieces(Reasoning, self._held[:keep])
            self._held = self._held[keep:]
            return False
        events += _pieces(Reasoning, self._held[:at].rstrip("\n"))
        self._enter("", self._held[at + len(_THINK_END) :])
        self._skip_newlines = True
        return True

    def _in_call(self, events: list[Event]) -> bool:
        at = self._held.find(_CALL_END, self._searched)
        if at < 0:
            self._searched = max(0, len(self._held) - len(_CALL_END) + 1)
            return False
        body, rest = self._held[:at], self._held[at + len(_CALL_END) :]
        call = self._read(body)
        if call is None and self._calls and self._calls.goes_on(body):
            self._searched = at + len(_CALL_END)
            return True
        events += self._call_events(call) if call else _pieces(Text, self._blanks + _CALL + body + _CALL_END)
        self._enter("", rest)
        # Newlines that only separate calls belong to neither; text after a call keeps its own.
        self._blanks = ""
        return True

    def _read(self, body: str) -> ParsedCall | None:
        call = self._calls.read(body, self._tools) if self._calls else None
        forbidden = call is not None and self._allowed is not None and call[0] not in self._allowed
        return None if forbidden else call

    def _enter(self, mode: str, rest: str) -> None:
        self._inside = mode
        self._held = rest
        self._searched = 0
        self._skip_newlines = mode == _THINK

    def _unskipped(self, text: str) -> str:
        if not self._skip_newlines:
            return text
        text = text.lstrip("\n")
        self._skip_newlines = not text
        return text

    def _call_events(self, call: ParsedCall) -> list[Event]:
        index = self._num_calls
        self._num_calls += 1
        return [CallStarted(index, self._new_call_id(), call[0]), CallArguments(index, call[1])]


def _pieces(kind: type[Reasoning | Text], text: str) -> list[Event]:
    return [kind(text)] if text else []


def _undecided(text: str, tags: tuple[str, ...], blanks: str = _BLANKS) -> int:
    """Characters at the end of `text` that may be the beginning of a tag, with the blanks before them."""
    if text and text[-1] not in blanks and "<" not in text[-_LONGEST_TAG:]:
        return 0  # the usual case, and this runs for each piece of a stream
    start = len(text)
    for tag in tags:
        for length in range(min(len(tag) - 1, len(text)), 0, -1):
            if text.endswith(tag[:length]):
                start = min(start, len(text) - length)
                break
    while start and text[start - 1] in blanks:
        start -= 1
    return len(text) - start


class _HermesCall(msgspec.Struct):
    name: str
    arguments: msgspec.Raw = msgspec.Raw(b"{}")


_hermes: Final = msgspec.json.Decoder(_HermesCall)


class Hermes:
    """{"name": …, "arguments": {…}}; the arguments' text is kept as it was sampled."""

    def read(self, body: str, tools: Mapping[str, Tool]) -> ParsedCall | None:
        del tools  # the JSON is typed by itself
        try:
            call = _hermes.decode(body.strip())
            arguments = bytes(call.arguments).decode()
            if arguments.startswith('"'):
                arguments = msgspec.json.decode(arguments, type=str)
        except (msgspec.MsgspecError, UnicodeError, RecursionError):
            return None
        return (call.name, arguments) if call.name and parse_object(arguments) is not None else None

    def goes_on(self, body: str) -> bool:
        inside = escaped = False
        for character in body:
            if escaped:
                escaped = False
            elif inside and character == "\\":
                escaped = True
            elif character == '"':
                inside = not inside
        return inside


_FUNCTION: Final = re.compile(r"\s*<function=([^>\s]+)>")
_FUNCTION_END: Final = re.compile(r"\s*</function>\s*\Z")
_PARAMETER: Final = re.compile(r"\s*<parameter=([^>\s]+)>")
_PARAMETER_END: Final = re.compile(r"</parameter>(?=\s*(?:<parameter=[^>\s]+>|</function>\s*\Z))")


class Coder:
    """<function=NAME><parameter=KEY>VALUE</parameter>…</function>; values typed by the tool's schema.

    Every tag must be closed: an answer that was cut off holds no call, only its beginning.
    """

    def read(self, body: str, tools: Mapping[str, Tool]) -> ParsedCall | None:
        opening = _FUNCTION.match(body)
        if opening is None:
            return None
        tool = tools.get(opening[1])
        declared = (tool.parameters or {}).get("properties") if tool else None
        properties: dict[str, object] = declared if isinstance(declared, dict) else {}
        arguments: dict[str, object] = {}
        at = opening.end()
        while found := _PARAMETER.match(body, at):
            end = _PARAMETER_END.search(body, found.end())
            if end is None:
                return None
            value, at = body[found.end() : end.start()], end.end()
            if any(key in properties for key in _PARAMETER.findall(value)):
                return None  # the parameter before that one was not closed
            schema = properties.get(found[1])
            kind = schema.get("type") if isinstance(schema, dict) else None
            arguments[found[1]] = _typed(_one_newline_less(value), kind)
        if _FUNCTION_END.match(body, at) is None:
            return None
        return opening[1], msgspec.json.encode(arguments).decode()

    def goes_on(self, body: str) -> bool:
        opening = _FUNCTION.match(body)
        in_parameter = opening is not None and _PARAMETER.match(body, opening.end()) is not None
        return in_parameter and not body.rstrip().endswith(("</parameter>", "</function>"))


def _one_newline_less(value: str) -> str:
    value = value.removeprefix("\n")
    return value.removesuffix("\n")


def _typed(value: str, kind: object) -> object:
    if kind in (None, "string"):
        return value
    text = value.strip()
    if kind == "boolean" and text.lower() in ("true", "false"):
        return text.lower() == "true"
    try:
        return msgspec.json.decode(text)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return value
