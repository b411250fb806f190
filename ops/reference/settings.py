"""docs/config.md: every table of a config file with its keys, from the structs that decode it."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from enum import Enum
from typing import Final

import msgspec
import msgspec.inspect

from ops.arena.config import ArenaServerConfig
from ops.config import DERIVED, RunConfig
from ops.logtools.message_docs import field_docs, type_text
from stages.assembly.settings import AssemblySettings

_HEAD: Final = """\
# Settings

Generated from the code by `python -m ops.reference`; do not edit by hand.

A run's config is one TOML file. Every key has a default, except where `required` stands; an unknown key, a wrong type or a value
that can't work ends the command before anything starts, with the key's path. `--set a.b=value` overrides one key, and
`--set streams.NAME.key=value` one of a stream.
"""
_ELSEWHERE: Final = {
    "loss": "The policy loss: see [losses](losses.md) for every method and setting.",
    "training.advantages": "Token-level advantages: see [training](training.md).",
}
_OPEN: Final = {"assembly": AssemblySettings, "local_arena": ArenaServerConfig}
"""Tables that a config leaves undecoded until the room that they belong to reads them."""


def settings_page() -> str:
    """The page, a part a table, in the order of the config."""
    info = msgspec.inspect.type_info(RunConfig)
    if not isinstance(info, msgspec.inspect.StructType):
        raise TypeError(f"expected a struct, found {info}")
    parts = [_HEAD]
    for field in info.fields:
        if field.name in _ELSEWHERE:
            parts.append(f"## [{field.name}]\n\n{_ELSEWHERE[field.name]}\n")
        elif field.name in _OPEN:
            parts.extend(_tables(_OPEN[field.name], field.name, f"[{field.name}]"))
        else:
            for struct, is_list in _structs(field.type):
                parts.extend(_tables(struct, field.name, f"[[{field.name}]]" if is_list else f"[{field.name}]"))
    return "\n".join(parts).rstrip() + "\n"


def _structs(kind: msgspec.inspect.Type) -> Iterator[tuple[type[msgspec.Struct], bool]]:
    """The structs directly below a field, and whether each stands in a list."""
    match kind:
        case msgspec.inspect.StructType(cls=cls):
            yield cls, False
        case msgspec.inspect.ListType(item_type=item) | msgspec.inspect.VarTupleType(item_type=item):
            yield from ((struct, True) for struct, _ in _structs(item))
        case msgspec.inspect.UnionType(types=members):
            for member in members:
                yield from _structs(member)
        case _:
            pass


def _tables(struct: type[msgspec.Struct], path: str, title: str) -> Iterator[str]:
    """A table's part, then those of the tables in it."""
    info = msgspec.inspect.type_info(struct)
    if not isinstance(info, msgspec.inspect.StructType):
        raise TypeError(f"expected a struct, found {info}")
    docs = field_docs(struct)
    below: list[tuple[type[msgspec.Struct], str, str]] = []
    lines = [f"## {title}", "", _summary(struct), "", "| key | type | default | |", "| --- | --- | --- | --- |"]
    for field in info.fields:
        if path == "assembly" and field.name in DERIVED:
            continue
        where = f"{path}.{field.name}"
        inner = list(_structs(field.type))
        below += [(cls, where, f"[[{where}]]" if is_list else f"[{where}]") for cls, is_list in inner]
        text = docs.get(field.name, "").replace("|", "\\|") or _ELSEWHERE.get(where, "")
        kind = type_text(field.type).removesuffix(" or nil")
        lines.append(f"| `{field.name}` | {kind} | {_default(field, bool(inner))} | {text} |")
    yield "\n".join(lines) + "\n"
    for cls, where, inner_title in below:
        yield from _tables(cls, where, inner_title)


def _summary(struct: type[msgspec.Struct]) -> str:
    text = " ".join(inspect.cleandoc(struct.__doc__ or "").split())
    text = text.partition("]: ")[2] or text
    return text[:1].upper() + text[1:]


def _default(field: msgspec.inspect.Field, is_table: bool) -> str:
    if field.required:
        return "required"
    if is_table:
        return "its own" if isinstance(field.default, msgspec.Struct) else "none"
    value = field.default
    if field.default_factory is not msgspec.NODEFAULT:
        value = field.default_factory()
    if value is None:
        return "none"
    plain: object = value.value if isinstance(value, Enum) else msgspec.to_builtins(value)
    return f"`{json.dumps(plain, ensure_ascii=False)}`"
