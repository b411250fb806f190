"""When is a message the one that was recorded? Digests of parsed, normalised messages; no tokens here.

Two messages get the same digest when they are equal up to what real clients are known to rewrite between one request and the next:

- cache marks, unknown keys, a string instead of one text block: gone with parsing;
- an assistant's text of blanks only, dropped; null and missing content;
- tool arguments: key order, spacing, an added default of the tool's schema, "5" or 5.0 for the integer 5, "true" for true, and what Claude Code does to
  three of its own tools (`_REWRITES`); arguments that it could not parse come back wrapped;
- ids of tool calls left out, reasoning left out (both judged apart from the digest, in the forest).

Anything else is an edit of the history, and the model must see it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Final

import msgspec
import xxhash

from stages.gateway.conversation import Message, Tool, ToolCall

Digest = bytes
"""16 bytes, xxh3-128."""

_BLANKS: Final = re.compile(r"[ \t]+(?=\r?\n|\r?\Z)")
_CD: Final = re.compile(r"""\Acd (?:"[^"]*"|'[^']*'|[^\s;&|]+) && """)
_UNPARSED: Final = "__unparsedToolInput"
_sorted_json: Final = msgspec.json.Encoder(order="sorted")


def _without_trailing_blanks(text: str) -> str:
    return _BLANKS.sub("", text)


def _shell(text: str) -> str:
    return _CD.sub("", text.replace("\\\\;", "\\;"))


_REWRITES: Final[Mapping[tuple[str, str], Callable[[str], str]]] = {
    ("Write", "content"): _without_trailing_blanks,
    ("Edit", "new_string"): _without_trailing_blanks,
    ("Bash", "command"): _shell,
}
"""(tool, argument) → what Claude Code makes of it before it sends the call back."""


def root_digest(tools: tuple[Tool, ...]) -> Digest:
    """Where every chain of a conversation with these tools starts."""
    return xxhash.xxh3_128_digest(_sorted_json.encode(tools))


def extend_digest(before: Digest, message: Digest) -> Digest:
    """The digest of a conversation with one more message."""
    return xxhash.xxh3_128_digest(before + message)


def message_digest(message: Message, tools: Mapping[str, Tool]) -> Digest:
    """What a message says, ids of calls and reasoning left out."""
    if message.role != "assistant":
        return xxhash.xxh3_128_digest(msgspec.json.encode((message.role, message.text, message.call_id)))
    text = message.text
    calls = [(call.name, canonical_arguments(call, tools.get(call.name))) for call in message.calls]
    return xxhash.xxh3_128_digest(msgspec.json.encode(("assistant", text if text.strip() else "", calls)))


def canonical_arguments(call: ToolCall, tool: Tool | None) -> str:
    """A call's arguments in the one form that all known rewrites of them share."""
    value = parse_object(call.arguments)
    if value is None:
        return call.arguments
    wrapped = value.get(_UNPARSED)
    if len(value) == 1 and isinstance(wrapped, dict):
        raw = wrapped.get("raw")  # pyright: ignore[reportUnknownMemberType] - JSON of a client
        return raw if isinstance(raw, str) else call.arguments
    properties = _properties(tool)
    kept: dict[str, object] = {}
    for key, given in value.items():
        schema = properties.get(key, {})
        normal = _normal(given, schema.get("type"))
        if "default" in schema and _same(normal, _normal(schema["default"], schema.get("type"))):
            continue
        rewrite = _REWRITES.get((call.name, key))
        kept[key] = rewrite(normal) if rewrite is not None and isinstance(normal, str) else normal
    return _sorted_json.encode(kept).decode()


def parse_object(text: str) -> dict[str, object] | None:
    """The JSON object of `text`, or None when it is none (or nested beyond what can be parsed)."""
    try:
        value = msgspec.json.decode(text, type=dict[str, object])
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return None
    return value


def _properties(tool: Tool | None) -> dict[str, dict[str, object]]:
    found = (tool.parameters or {}).get("properties") if tool else None
    if not isinstance(found, dict):
        return {}
    return {str(key): value for key, value in found.items() if isinstance(value, dict)}  # pyright: ignore[reportUnknownArgumentType] - a client's JSON schema


def _same(left: object, right: object) -> bool:
    return type(left) is type(right) and left == right


def _normal(value: object, kind: object) -> object:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, str) and kind == "boolean":
        return {"true": True, "false": False}.get(value, value)
    if isinstance(value, str) and kind in ("integer", "number"):
        try:
            number = float(value)
        except ValueError:
            return value
        return int(number) if number.is_integer() else number
    if isinstance(value, list):
        return [_normal(one, None) for one in value]  # pyright: ignore[reportUnknownVariableType] - JSON
    if isinstance(value, dict):
        return {str(key): _normal(one, None) for key, one in value.items()}  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType] - JSON
    return value
