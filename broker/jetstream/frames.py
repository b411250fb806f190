"""The bytes of a NATS connection, cut into messages and control lines, with as few copies as can be: whoever reads the socket writes
straight into `space()` and says with `filled(n)` how much came.

    socket ──▶ room (64 KiB) ──▶ small messages, copied out as bytes; control lines (PING, INFO, -ERR …)
          └──▶ a buffer of its own for each large message, handed on as it is

It must not know sockets or what is said.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

import numpy as np

ROOM_BYTES: Final = 64 * 1024
LARGE_BYTES: Final = 16 * 1024
"""A message above this that has not come whole gets a buffer of its own."""
SHOWN_BYTES: Final = 200
"""Of a line that can't be understood."""
_END: Final = b"\r\n"
_M: Final = ord("M")
_H: Final = ord("H")

Deliver = Callable[[int, bytes, bytes, bytes | memoryview, bytes | None], None]
"""Called with subscription id, subject, reply subject, data and raw headers of each message. Must not raise or block."""


class _Head(NamedTuple):
    """What a message's first line says."""

    sid: int
    subject: bytes
    reply: bytes
    headers_bytes: int
    size_bytes: int
    """Headers and data together, without the line end that follows."""


class Frames:
    """What one connection receives."""

    def __init__(self, deliver: Deliver, control: Callable[[bytes], None]) -> None:
        """Args:
        deliver: takes the messages.
        control: takes every other line, whole, and the beginning of the first one that can't be understood: nothing comes after it.
        """
        self._deliver = deliver
        self._control = control
        self._room = bytearray(ROOM_BYTES)
        self._view = memoryview(self._room)
        self._start = 0
        self._end = 0
        self._head: _Head | None = None
        self._large: memoryview | None = None
        self._large_filled = 0
        self._broken = False

    def space(self) -> memoryview:
        """Where the next bytes belong; never empty."""
        if self._large is not None:
            return self._large[self._large_filled :]
        return self._view if self._broken else self._view[self._end :]

    def filled(self, size_bytes: int) -> None:
        """So many bytes came into `space()`."""
        if self._broken:
            return
        if self._large is None:
            self._end += size_bytes
            self._cut()
            return
        self._large_filled += size_bytes
        if self._large_filled == len(self._large):
            whole, self._large = self._large.toreadonly(), None
            head = self._head
            self._head = None
            if head is not None:
                self._hand_on(head, whole)

    def _cut(self) -> None:
        """Take what is whole out of the room; move the rest to its beginning."""
        start, end = self._start, self._end
        while start < end:
            head = self._head
            if head is None:
                line_end = self._room.find(_END, start, end)
                if line_end < 0:
                    if end - start == ROOM_BYTES:
                        self._give_up(b"a line without an end\r\n")
                    break
                line = bytes(self._view[start : line_end + 2])
                start = line_end + 2
                if line[0] != _M and line[0] != _H:
                    self._control(line)
                    continue
                head = _head_of(line)
                if head is None:
                    self._give_up(line)
                    break
                self._head = head
            size = head.size_bytes
            if end - start >= size + 2:
                self._head = None
                self._hand_on(head, self._view[start : start + size])
                start += size + 2
            elif size > LARGE_BYTES:
                self._begin_large(size + 2, self._view[start:end])
                start = end
            else:
                break
        if start == end:
            self._start = self._end = 0
        else:
            rest = end - start
            self._room[:rest] = self._room[start:end]
            self._start, self._end = 0, rest

    def _begin_large(self, size_bytes: int, first: memoryview) -> None:
        self._large = np.empty(
            size_bytes, dtype=np.uint8
        ).data  # not a bytearray: that would be filled with zeros first
        self._large[: len(first)] = first
        self._large_filled = len(first)

    def _hand_on(self, head: _Head, content: memoryview) -> None:
        """A message's headers and data; `content` may be part of the room, or hold more than the message."""
        split, size = head.headers_bytes, head.size_bytes
        headers = bytes(content[:split]) if split else None
        data = content[split:size] if size > LARGE_BYTES and content.readonly else bytes(content[split:size])
        self._deliver(head.sid, head.subject, head.reply, data, headers)

    def _give_up(self, line: bytes) -> None:
        self._broken = True
        self._control(line.rstrip()[:SHOWN_BYTES] + _END)  # nats-py would wait for the rest of a longer one


def _head_of(line: bytes) -> _Head | None:
    """`MSG subject sid [reply] size` or `HMSG subject sid [reply] headers size`; None for anything else."""
    words = line.split()
    with_headers = words[0] == b"HMSG"
    fixed = 5 if with_headers else 4
    if not with_headers and words[0] != b"MSG":
        return None
    if not fixed <= len(words) <= fixed + 1:
        return None
    try:
        sid, size = int(words[2]), int(words[-1])
        headers = int(words[-2]) if with_headers else 0
    except ValueError:
        return None
    if not 0 <= headers <= size:
        return None
    return _Head(sid, words[1], words[3] if len(words) > fixed else b"", headers, size)
