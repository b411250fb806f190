"""A TOML tree against the structs that it becomes: unknown keys, wrong types, words that there are not, each by path."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from typing import Any

import msgspec
import msgspec.inspect

from schemas.errors import ConfigError


def check_keys(
    tree: Any, kind: type[msgspec.Struct], path: str, *, leave_out: frozenset[str] = frozenset()
) -> None:  # Any: a TOML tree
    """Refuse unknown keys by path, with what is allowed and what was probably meant.

    Raises:
        ConfigError: the first unknown key.
    """
    if not isinstance(tree, dict):
        return
    table: dict[str, Any] = tree
    info = msgspec.inspect.type_info(kind)
    if not isinstance(info, msgspec.inspect.StructType):
        return
    fields = {field.encode_name: field for field in info.fields if field.encode_name not in leave_out}
    tag = info.tag_field
    for key, value in table.items():
        where = f"{path}.{key}" if path else key
        if key == tag:
            continue
        if key not in fields:
            close = difflib.get_close_matches(key, fields, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise ConfigError(f"{where}: unknown key{hint} Allowed here: {', '.join(sorted(fields))}")
        _check_value(value, fields[key].type, where)


def _check_value(value: Any, kind: msgspec.inspect.Type, where: str) -> None:
    match kind:
        case msgspec.inspect.StructType(cls=cls):
            check_keys(value, cls, where)
        case msgspec.inspect.ListType(item_type=item) | msgspec.inspect.VarTupleType(item_type=item):
            if isinstance(value, list):
                for index, member in enumerate(value):
                    _check_value(member, item, f"{where}[{index}]")
        case msgspec.inspect.UnionType(types=members):
            structs = [member for member in members if isinstance(member, msgspec.inspect.StructType)]
            if len(structs) == 1:
                check_keys(value, structs[0].cls, where)
        case _:
            return


def convert(tree: Mapping[str, Any], kind: type[Any], path: str) -> Any:
    """A tree as its struct.

    Raises:
        ConfigError: a value that can't be there, by path, with what may be.
    """
    try:
        return msgspec.convert(tree, kind)
    except msgspec.ValidationError as error:
        text = str(error)
        found = re.search(r" - at `\$\.?(.*)`$", text)
        below = found[1] if found else ""
        reason = text[: found.start()] if found else text
        words = _words(msgspec.inspect.type_info(kind), below)
        if words and (wrong := re.match(r"Invalid (?:enum )?value (.*)", reason)):
            close = difflib.get_close_matches(wrong[1].strip("'"), words, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            reason = f"expected one of {', '.join(words)}, found {wrong[1]}{hint}"
        where = ".".join(part for part in (path, below) if part)
        raise ConfigError(f"{where or 'config'}: {reason}") from error


def _words(kind: msgspec.inspect.Type, path: str) -> list[str]:
    """The words that the key at `path` below `kind` may be; none where it is no choice of words."""
    key, _, below = path.partition(".")
    name = key.partition("[")[0]
    words: list[str] = []
    for member in _members(kind):
        match member:
            case msgspec.inspect.StructType(fields=fields) if name:
                if name == member.tag_field:
                    words.append(str(member.tag))
                for field in fields:
                    if field.encode_name == name:
                        words += _words(field.type, below)
            case msgspec.inspect.EnumType(cls=cls) if not name:
                words += [str(one.value) for one in cls]
            case msgspec.inspect.LiteralType(values=values) if not name:
                words += [str(value) for value in values]
            case _:
                pass
    return words


def _members(kind: msgspec.inspect.Type) -> list[msgspec.inspect.Type]:
    """The types that a value may have: those of a union, of a list's items."""
    match kind:
        case msgspec.inspect.UnionType(types=types):
            return [inner for member in types for inner in _members(member)]
        case msgspec.inspect.ListType(item_type=item) | msgspec.inspect.VarTupleType(item_type=item):
            return _members(item)
        case _:
            return [kind]
