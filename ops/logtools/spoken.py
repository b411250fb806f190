"""What was said in a recorded call, as a person reads it: pure.

A call's `messages_json` is what the gateway wrote down (`RecordedCall`: new messages, tools, the answer), or what another writer
put there: a list of chat messages. Anything else is shown as it is.
"""

from __future__ import annotations

from typing import Final

import msgspec

from ops.logtools.plain import Plain

_PARTS: Final = ("texts", "reasoning", "calls", "call_id", "is_error", "role", "content")


class Spoken(msgspec.Struct, frozen=True, kw_only=True):
    """One message."""

    role: str
    """Empty: no message, shown as it is."""
    text: str
    reasoning: str = ""
    calls: list[str] = []
    """Tool calls: `name(arguments)`."""
    extra: str = ""
    """Whatever else there is, as JSON."""


def spoken(recorded: Plain) -> list[Spoken]:
    """The messages of a call in order, its answer last."""
    if recorded is None:
        return []
    if isinstance(recorded, list):
        return [_message(message) for message in recorded]
    if not isinstance(recorded, dict) or not {"answer", "messages"} & recorded.keys():
        return [_message(recorded)]
    messages = recorded.get("messages")
    found = [_message(message) for message in (messages if isinstance(messages, list) else [])]
    if isinstance(text := recorded.get("text"), str):
        found.append(Spoken(role="prompt", text=text))
    if isinstance(tools := recorded.get("tools"), list) and tools:
        names = ", ".join(str(tool.get("name", "?")) if isinstance(tool, dict) else "?" for tool in tools)
        found.insert(0, Spoken(role="tools", text=names))
    if recorded.get("answer") is not None:
        found.append(_message(recorded["answer"]))
    return found


def _message(message: Plain) -> Spoken:
    if not isinstance(message, dict) or "role" not in message:
        return Spoken(role="", text=_text(message))
    calls = message.get("calls")
    extra = {name: value for name, value in message.items() if name not in _PARTS and value}
    role = str(message["role"])
    if message.get("call_id"):
        role += f" {message['call_id']}"
    if message.get("is_error"):
        role += " (error)"
    return Spoken(
        role=role,
        text=_said(message),
        reasoning=str(message.get("reasoning") or ""),
        calls=[_tool_call(call) for call in (calls if isinstance(calls, list) else [])],
        extra=_text(extra) if extra else "",
    )


def _said(message: dict[str, Plain]) -> str:
    texts = message.get("texts")
    if isinstance(texts, list):
        return ("" if message["role"] == "assistant" else "\n").join(_text(text) for text in texts)
    content = message.get("content")
    if isinstance(content, list):
        return "\n".join(
            str(part["text"]) if isinstance(part, dict) and isinstance(part.get("text"), str) else _text(part)
            for part in content
        )
    return "" if content is None else _text(content)


def _tool_call(call: Plain) -> str:
    if not isinstance(call, dict):
        return _text(call)
    return f"{call.get('name', '?')}({_text(call.get('arguments', ''))})"


def _text(value: Plain) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()
