"""Redaction by rule: what must not leave the run is taken out before it is written.

    TOPIC.FIELD[.FIELD…]=drop|mask|hash     e.g.  interaction.recorded.tokens.messages_json=drop
    secrets                                  masks what looks like a credential in every text

A path may lead through a payload (`tokens` of an interaction); a payload that was changed gets a new content address, and
the message names that one. Rules stand in the recording's header.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Final

import msgspec

from broker.recording.references import PAYLOAD_TYPES
from schemas.errors import ConfigError
from schemas.payload import INLINE, PayloadRef, digest, inline_ref, run_ref
from schemas.subjects import Topic
from schemas.topics import TOPICS, topic_named

MASK: Final = "***"
SECRETS: Final = "secrets"
_SECRET_TEXT: Final = re.compile(
    r"""(?i)(bearer\s+|(?:token|api[_-]?key|password|passwd|secret)\\?["']?\s*[=:]\s*\\?["']?)([^\s"',}\\]{4,})"""
)
_SECRET_KEY: Final = re.compile(r"\b(?:sk|pk|ghp|gho|hf|xox[abp])[-_][A-Za-z0-9_-]{12,}")
_URL_USER: Final = re.compile(r"(\w+://)[^/\s@\"]+@")
_FIXED: Final = ("trajectory.ready.rows.tokens", "step.assembled.manifest")
"""Payloads that a manifest or a step names by content: changing them would cut the step from its rows."""


class Action(StrEnum):
    """What is done with a field."""

    DROP = "drop"
    """Empty, or its default."""
    MASK = "mask"
    """`***`"""
    HASH = "hash"
    """xxh3 of it: equal values stay equal."""


class Rule(msgspec.Struct, frozen=True, kw_only=True):
    """One field and what is done with it; with topic `` it is the rule for secrets."""

    topic: str
    path: tuple[str, ...]
    action: Action


def parse_rule(text: str) -> Rule:
    """The rule in a line.

    Raises:
        ConfigError: not a rule, or it names a topic or field that there is not.
    """
    if text.strip() == SECRETS:
        return Rule(topic="", path=(), action=Action.MASK)
    where, equals, action = text.strip().partition("=")
    tokens = where.split(".")
    if not equals or len(tokens) < 3 or action not in set(Action):
        raise ConfigError(f"redaction {text!r}: expected 'topic.field=drop', '=mask' or '=hash', or 'secrets'")
    topic = topic_named(".".join(tokens[:2]))
    if topic is None:
        known = ", ".join(sorted(topic.name for topic in TOPICS))
        raise ConfigError(f"redaction {text!r}: there is no topic {'.'.join(tokens[:2])!r}; topics: {known}")
    if where.startswith(_FIXED):
        raise ConfigError(f"redaction {text!r}: rows and manifests are named by their content and can't be changed")
    _check_path(topic, tokens[2:], text)
    return Rule(topic=topic.name, path=tuple(tokens[2:]), action=Action(action))


def _check_path(topic: Topic[msgspec.Struct], path: Sequence[str], text: str) -> None:
    kind: type[msgspec.Struct] = topic.message
    for depth, name in enumerate(path):
        if name not in kind.__struct_fields__:
            raise ConfigError(
                f"redaction {text!r}: {kind.__name__} has no field {name!r}; fields: {', '.join(kind.__struct_fields__)}"
            )
        if depth == len(path) - 1:
            return
        payload = PAYLOAD_TYPES.get(f"{topic.name}.{'.'.join(path[: depth + 1])}")
        if not (isinstance(payload, type) and issubclass(payload, msgspec.Struct)):
            raise ConfigError(f"redaction {text!r}: {name!r} has no fields of its own")
        kind = payload


class Redactor:
    """Applies rules. `payloads` collects the changed payloads that the changed messages name."""

    def __init__(self, rules: Sequence[Rule]) -> None:
        self.payloads: Final[list[tuple[str, bytes]]] = []
        self._rules: Final = [rule for rule in rules if rule.topic]
        self._topics: Final = {rule.topic for rule in self._rules}
        self._secrets: Final = any(not rule.topic for rule in rules)

    def concerns(self, topic: str) -> bool:
        """Whether messages of a topic may be changed."""
        return self._secrets or topic in self._topics

    def message(
        self,
        topic: Topic[msgspec.Struct],
        message: msgspec.Struct,
        payload: Callable[[PayloadRef], memoryview | None],
    ) -> msgspec.Struct:
        """The message as it may be written. Its payloads are read through `payload`."""
        for rule in self._rules:
            if rule.topic == topic.name:
                message = self._replace(message, topic.name, rule.path, rule.action, payload)
        return self._without_secrets(message, topic.name, payload) if self._secrets else message

    def _replace(
        self,
        value: msgspec.Struct,
        where: str,
        path: tuple[str, ...],
        action: Action,
        payload: Callable[[PayloadRef], memoryview | None],
    ) -> msgspec.Struct:
        name, rest = path[0], path[1:]
        former = getattr(value, name)
        if not rest:
            if action is Action.DROP and isinstance(former, PayloadRef):
                return msgspec.structs.replace(value, **{name: inline_ref(b"")})
            return msgspec.structs.replace(value, **{name: _changed(former, action, _default(value, name))})
        if not isinstance(former, PayloadRef):
            return value
        kind = PAYLOAD_TYPES[f"{where}.{name}"]
        data = former.inline if former.inline is not None else payload(former)
        if data is None or not (isinstance(kind, type) and issubclass(kind, msgspec.Struct)):
            return value
        content: msgspec.Struct = msgspec.msgpack.decode(data, type=kind)
        content = self._replace(content, f"{where}.{name}", rest, action, payload)
        return msgspec.structs.replace(value, **{name: self._named(former, msgspec.msgpack.encode(content))})

    def _named(self, former: PayloadRef, data: bytes) -> PayloadRef:
        if former.store == INLINE:
            return inline_ref(data)
        ref = run_ref(data)
        self.payloads.append((ref.id, data))
        return ref

    def _without_secrets(
        self, value: msgspec.Struct, where: str, payload: Callable[[PayloadRef], memoryview | None]
    ) -> msgspec.Struct:
        changes: dict[str, object] = {}
        for name in value.__struct_fields__:
            former = getattr(value, name)
            now = self._masked(former, f"{where}.{name}", payload)
            if now is not former:
                changes[name] = now
        return msgspec.structs.replace(value, **changes) if changes else value

    def _masked(self, value: object, where: str, payload: Callable[[PayloadRef], memoryview | None]) -> object:
        if isinstance(value, StrEnum):
            return value
        if isinstance(value, str):
            return mask_text(value)
        if isinstance(value, bytes):
            return mask_bytes(value)
        if isinstance(value, PayloadRef):
            return self._masked_payload(value, where, payload)
        if isinstance(value, msgspec.Struct):
            return self._without_secrets(value, where, payload)
        if isinstance(value, list):
            items: list[object] = value
            masked = [self._masked(item, where, payload) for item in items]
            return masked if any(a is not b for a, b in zip(items, masked, strict=True)) else items
        return value

    def _masked_payload(
        self, ref: PayloadRef, where: str, payload: Callable[[PayloadRef], memoryview | None]
    ) -> PayloadRef:
        if where.startswith((*_FIXED, "weights.published")):
            return ref
        data = ref.inline if ref.inline is not None else payload(ref)
        if data is None:
            return ref
        kind = PAYLOAD_TYPES.get(where)
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
            content = msgspec.msgpack.decode(data, type=kind)
            cleaned = self._without_secrets(content, where, payload)
            return ref if cleaned is content else self._named(ref, msgspec.msgpack.encode(cleaned))
        if kind is not None:
            return ref
        raw = bytes(data)
        masked = mask_bytes(raw)
        return ref if masked is raw else self._named(ref, masked)


def _default(value: msgspec.Struct, name: str) -> object:
    field = next(field for field in msgspec.structs.fields(value) if field.name == name)
    if field.default is not msgspec.NODEFAULT:
        return field.default
    return field.default_factory() if field.default_factory is not msgspec.NODEFAULT else msgspec.NODEFAULT


def _changed(value: object, action: Action, default: object) -> object:
    if action is Action.DROP and default is not msgspec.NODEFAULT:
        return default
    match value:
        case str():
            return {Action.DROP: "", Action.MASK: MASK, Action.HASH: f"xxh3:{digest(value.encode())}"}[action]
        case bytes():
            text = {Action.DROP: "", Action.MASK: f'"{MASK}"', Action.HASH: f'"xxh3:{digest(value)}"'}[action]
            return text.encode()
        case list():
            return []
        case dict():
            return {}
        case float() | int():
            return type(value)(0)
        case _:
            return value


def mask_text(text: str) -> str:
    """`text` with what looks like a credential masked; `text` itself if nothing does."""
    masked = _SECRET_KEY.sub(MASK, _URL_USER.sub(rf"\1{MASK}@", _SECRET_TEXT.sub(rf"\1{MASK}", text)))
    return text if masked == text else masked


def mask_bytes(data: bytes) -> bytes:
    """The same for UTF-8 bytes; other bytes are no text and stay."""
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        return data
    masked = mask_text(text)
    return data if masked is text else masked.encode()
