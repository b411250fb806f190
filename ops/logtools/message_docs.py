"""`headrace schema` and docs/messages.md: every message with its subject, headers and fields, generated from the code."""

from __future__ import annotations

import ast
import inspect
import itertools
import json
import textwrap
from typing import Final

import msgspec
import msgspec.inspect

from ops.logtools.plain import Plain
from schemas.json_schema import SCHEMA_VERSION, json_schema_of, subject_form
from schemas.subjects import Topic
from schemas.topics import TOPICS

CREATE_ONCE_HEADER: Final = "Nats-Expected-Last-Subject-Sequence"
_HEADERS: Final[dict[str, Plain]] = {
    CREATE_ONCE_HEADER: "0: the message is created once. On 'wrong last sequence' (10071) read what stands there: the same "
    "bytes are success, other bytes mean that somebody else was first.",
    "Nats-Msg-Id": "a new random id for each call, so that a publish whose answer was lost can be sent again.",
}

_INTRO: Final = """\
# Messages

Generated from the code by `headrace schema --markdown`; do not edit by hand.

A run's log is one JetStream stream, `HR_<run>`, on the subjects `hr.<run>.>`. A message is msgpack: a map of the field
names below (`bin` for bytes; array-like structs as arrays in the order of their fields; fields with a default may be left
out; unknown fields are ignored). `headrace schema` prints JSON Schema for each, in which `contentEncoding: base64` stands
for msgpack `bin`.

A subject is the identity of its message. A token of a key holds letters, digits, `_` and `-`; any other byte is written
`=XX` (its hexadecimal value). Publish with these headers:

- `Nats-Expected-Last-Subject-Sequence: 0`: the message is created once. On the error 10071 (wrong last sequence) read what
  stands there: the same bytes are success, other bytes mean that somebody else was first, and theirs stand.
- `Nats-Msg-Id`: a new random id for each message, so that a publish whose answer was lost can be sent again.

A payload reference (`PayloadRef`) names bytes by `id`, their 128-bit xxh3 as 32 hexadecimal digits, and `size_bytes`. With
`store: "inline"` the bytes ride in `inline` (up to 16 KiB); with `store: "run"` they lie in the run's payload store.
`examples/publish_prompt.mjs` publishes a prompt from JavaScript.
"""


def schema_document(topics: tuple[Topic[msgspec.Struct], ...] = TOPICS) -> dict[str, Plain]:
    """All messages as one JSON document."""
    return {
        "schema_version": SCHEMA_VERSION,
        "encoding": "msgpack",
        "headers": _HEADERS,
        "topics": {
            topic.name: {
                "message": topic.message.__name__,
                "subject": subject_form(topic.name, topic.key_fields),
                "key": [*topic.key_fields.split(".")],
                "description": _summary(topic.message),
                "schema": json_schema_of(topic.message),
            }
            for topic in topics
        },
    }


def markdown() -> str:
    """docs/messages.md."""
    parts = [_INTRO]
    seen: dict[str, type[msgspec.Struct]] = {}
    for topic in TOPICS:
        parts += [f"## {topic.name}", f"`{subject_form(topic.name, topic.key_fields)}`: {topic.message.__name__}"]
        parts.append(_described(topic.message))
        for inner in _inner_structs(topic.message):
            seen.setdefault(inner.__name__, inner)
    parts.append("# Parts of messages")
    for name, struct in sorted(seen.items()):
        parts += [f"## {name}", _described(struct)]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def _described(struct: type[msgspec.Struct]) -> str:
    lines = [_summary(struct), "", "| field | type | default | |", "| --- | --- | --- | --- |"]
    docs = field_docs(struct)
    info = msgspec.inspect.type_info(struct)
    if isinstance(info, msgspec.inspect.StructType):
        for field in info.fields:
            default = _default(field)
            text = docs.get(field.name, "").replace("|", "\\|")
            lines.append(f"| `{field.name}` | {type_text(field.type)} | {default} | {text} |")
    return "\n".join(lines)


def _summary(struct: type[msgspec.Struct]) -> str:
    return " ".join(inspect.cleandoc(struct.__doc__ or "").split())


def field_docs(struct: type[msgspec.Struct]) -> dict[str, str]:
    """The docstrings under a struct's fields."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(struct)))
    body = tree.body[0].body if isinstance(tree.body[0], ast.ClassDef) else []
    found: dict[str, str] = {}
    for field, after in itertools.pairwise(body):
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(after, ast.Expr)
            and isinstance(after.value, ast.Constant)
            and isinstance(after.value.value, str)
        ):
            found[field.target.id] = " ".join(after.value.value.split())
    return found


def _default(field: msgspec.inspect.Field) -> str:
    if field.default_factory is not msgspec.NODEFAULT:
        return "`[]`" if field.default_factory is list else "`{}`"
    if field.default is msgspec.NODEFAULT:
        return "" if field.required else "yes"
    return f"`{json.dumps(field.default) if not isinstance(field.default, bytes) else 'empty'}`"


def type_text(kind: msgspec.inspect.Type) -> str:
    """A field's type in words."""
    match kind:
        case msgspec.inspect.StructType(cls=cls):
            return cls.__name__
        case msgspec.inspect.EnumType(cls=cls):
            return " \\| ".join(f'"{member.value}"' for member in cls)
        case msgspec.inspect.LiteralType(values=values):
            return " \\| ".join(json.dumps(value) for value in values)
        case msgspec.inspect.ListType(item_type=item):
            return f"list of {type_text(item)}"
        case msgspec.inspect.DictType(key_type=key, value_type=value):
            return f"map of {type_text(key)} to {type_text(value)}"
        case msgspec.inspect.UnionType(types=members):
            return " or ".join("nil" if isinstance(m, msgspec.inspect.NoneType) else type_text(m) for m in members)
        case msgspec.inspect.BytesType() | msgspec.inspect.MemoryViewType():
            return "bin"
        case _:
            return type(kind).__name__.removesuffix("Type").lower()


def _inner_structs(struct: type[msgspec.Struct]) -> list[type[msgspec.Struct]]:
    found: list[type[msgspec.Struct]] = []

    def walk(kind: msgspec.inspect.Type) -> None:
        match kind:
            case msgspec.inspect.StructType(cls=cls, fields=fields):
                if cls is not struct and cls not in found:
                    found.append(cls)
                for field in fields:
                    walk(field.type)
            case msgspec.inspect.ListType(item_type=item):
                walk(item)
            case msgspec.inspect.UnionType(types=members):
                for member in members:
                    walk(member)
            case _:
                pass

    walk(msgspec.inspect.type_info(struct))
    return found
