"""Messages as plain JSON values that a person can read: byte fields opened, arrays as lists, references by id."""

from __future__ import annotations

import base64
from datetime import UTC, datetime

import msgspec

from schemas.arrays import Array, Bits, Runs
from schemas.payload import PayloadRef

_LONG = 64
"""Items of an array that are shown before the rest is counted."""

Plain = None | bool | int | float | str | list["Plain"] | dict[str, "Plain"]


def plain(value: object, *, whole: bool = False) -> Plain:
    """`value` as JSON types.

    Args:
        whole: show all items of long arrays.
    """
    match value:
        case None | bool() | int() | float() | str():
            return value
        case Array() | Bits() | Runs():
            return _items(value, whole)
        case PayloadRef():
            return {"store": value.store, "id": value.id, "size_bytes": value.size_bytes}
        case msgspec.Struct():
            return {name: _field(name, getattr(value, name), whole) for name in value.__struct_fields__}
        case bytes() | memoryview():
            return _bytes(bytes(value))
        case list() | tuple():
            items: list[object] | tuple[object, ...] = value
            return [plain(item, whole=whole) for item in items]
        case dict():
            entries: dict[object, object] = value
            return {str(key): plain(item, whole=whole) for key, item in entries.items()}
        case _:
            return str(value)


def _field(name: str, value: object, whole: bool) -> Plain:
    if name.endswith("_json") and isinstance(value, bytes):
        return opened_json(value)
    return plain(value, whole=whole)


def opened_json(data: bytes | memoryview) -> Plain:
    """JSON bytes as values; other bytes as text or base64."""
    if not data:
        return None
    try:
        return msgspec.json.decode(data)
    except msgspec.DecodeError:
        return _bytes(bytes(data))


def _bytes(data: bytes) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return "base64:" + base64.b64encode(data).decode("ascii")


def _items(value: Array | Bits | Runs, whole: bool) -> Plain:
    items: list[Plain] = value.as_numpy().tolist()
    if whole or len(items) <= _LONG:
        return items
    return [*items[:_LONG], f"… {len(items) - _LONG} more"]


def clock(unix_time_s: float) -> str:
    """A time of day with milliseconds, UTC."""
    return datetime.fromtimestamp(unix_time_s, tz=UTC).strftime("%H:%M:%S.%f")[:-3]


def moment(unix_time_s: float) -> str:
    """Date and time, UTC."""
    return datetime.fromtimestamp(unix_time_s, tz=UTC).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3] + "Z"


def duration(seconds: float) -> str:
    """A span of time in the unit that reads best."""
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 120:
        return f"{seconds:.2f} s"
    if seconds < 7200:
        return f"{seconds / 60:.1f} min"
    return f"{seconds / 3600:.1f} h"


def size(num_bytes: float) -> str:
    """A number of bytes."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024 or unit == "GiB":
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    raise AssertionError("the last unit always returns")
