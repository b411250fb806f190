"""Writes golden bytes of every message: run once when a topic is added; never rewrite what stands.

python tests/schemas/golden_messages.py
"""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import msgspec.inspect

from schemas import arrays
from schemas.payload import inline_ref, run_ref
from schemas.topics import TOPICS

PATH = Path(__file__).parent / "golden_messages.json"


def sample(kind: msgspec.inspect.Type, name: str, full: bool) -> object:
    """A plausible value of a field's type."""
    match kind:
        case msgspec.inspect.IntType():
            return 1 + len(name)
        case msgspec.inspect.FloatType():
            return 0.5 + len(name)
        case msgspec.inspect.BoolType():
            return full
        case msgspec.inspect.StrType():
            return f"{name}-1"
        case msgspec.inspect.BytesType() | msgspec.inspect.MemoryViewType():
            return name.encode()
        case msgspec.inspect.EnumType(cls=cls):
            return next(iter(cls))
        case msgspec.inspect.ListType(item_type=item):
            return [sample(item, name, full)] if full else []
        case msgspec.inspect.DictType(value_type=value):
            return {name: sample(value, name, full)} if full else {}
        case msgspec.inspect.UnionType(types=types):
            real = [one for one in types if not isinstance(one, msgspec.inspect.NoneType)]
            return sample(real[0], name, full) if full else None
        case msgspec.inspect.StructType(cls=cls) if cls.__name__ == "PayloadRef":
            return run_ref(name.encode()) if full else inline_ref(name.encode())
        case msgspec.inspect.StructType(cls=cls) if cls.__name__ == "Array":
            return arrays.int32([1, 2, 3])
        case msgspec.inspect.StructType(cls=cls):
            return build(cls, full)
        case _:
            raise TypeError(f"no sample for {kind} of {name}")


def build(cls: type[msgspec.Struct], full: bool) -> msgspec.Struct:
    info = msgspec.inspect.type_info(cls)
    assert isinstance(info, msgspec.inspect.StructType)
    values = {f.name: sample(f.type, f.name, full) for f in info.fields if full or f.required}
    return cls(**values)


def main() -> None:
    golden: dict[str, list[str]] = json.loads(PATH.read_text()) if PATH.exists() else {}
    for topic in TOPICS:
        if topic.name not in golden:
            golden[topic.name] = [topic.encode(build(topic.message, full)).hex() for full in (True, False)]
    PATH.write_text(json.dumps(golden, indent=1) + "\n")


if __name__ == "__main__":
    main()
