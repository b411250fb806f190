"""NATS headers as bytes: written in one piece, read only where somebody asks."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Final

from schemas.errors import InvalidIdError

LINE: Final = b"NATS/1.0"
_NAME: Final = re.compile(r"[A-Za-z0-9!#$%&'+._^`|~-]+")


def write_headers(headers: Mapping[str, str]) -> bytes:
    """The lines of a header block, without its first line and its end.

    Raises:
        InvalidIdError: a name or value that would break the protocol, or a name that is the broker's own.
    """
    lines: list[str] = []
    for name, value in headers.items():
        if not _NAME.fullmatch(name) or name.lower().startswith("nats-"):
            raise InvalidIdError(f"expected a header name of letters, digits and '-', not starting 'Nats-': {name!r}")
        if "\r" in value or "\n" in value or value != value.strip():
            raise InvalidIdError(f"header {name}: expected one line without outer spaces, found {value!r}")
        lines.append(f"{name}: {value}\r\n")
    return "".join(lines).encode()


def status_of(block: bytes | None) -> int:
    """The status number on the first line (404, 503 …), or 0."""
    if block is None or block[8:9] != b" ":
        return 0
    digits = block[9:12]
    return int(digits) if digits.isdigit() else 0


def status_text(block: bytes) -> str:
    """The words after the status number."""
    return block.split(b"\r\n", 1)[0][12:].strip().decode("utf-8", "replace")


def header(block: bytes | None, name: bytes) -> str | None:
    """The value of one header."""
    if block is None:
        return None
    start = block.find(b"\r\n" + name + b":")
    if start < 0:
        return None
    start += len(name) + 3
    return block[start : block.index(b"\r\n", start)].strip().decode("utf-8", "replace")


def read_headers(block: bytes | None) -> dict[str, str]:
    """The headers that are not the broker's own (and Nats-Msg-Size, which tells the size of data left away)."""
    found: dict[str, str] = {}
    if block is None:
        return found
    for line in block.split(b"\r\n")[1:]:
        if line and (not line.startswith(b"Nats-") or line.startswith(b"Nats-Msg-Size")):
            name, _, value = line.partition(b":")
            found[name.decode("utf-8", "replace")] = value.strip().decode("utf-8", "replace")
    return found


def no_own_headers(blocks: Sequence[bytes | None]) -> bool:
    """Whether none of some header blocks has a header that is not the broker's own; looked at all at once."""
    some = [block for block in blocks if block is not None]
    lines = b"".join(some)
    return lines.count(b"\r\n") == lines.count(b"\r\nNats-") + 2 * len(some)
