"""The NATS protocol as a stream of frames, just enough to tell acknowledgements and deliveries from the rest. Pure."""

from __future__ import annotations

from typing import Final

import msgspec

_WITH_PAYLOAD: Final = frozenset({b"PUB", b"HPUB", b"MSG", b"HMSG"})
_ACK: Final = b"$JS.ACK."


class Frame(msgspec.Struct, frozen=True):
    """One protocol message with its bytes as they came."""

    raw: bytes
    verb: bytes
    subject: bytes = b""
    reply: bytes = b""

    @property
    def is_ack(self) -> bool:
        """A client's word about a delivery: done, not done, still working."""
        return self.verb in (b"PUB", b"HPUB") and self.subject.startswith(_ACK)

    @property
    def durable(self) -> bytes:
        """The consumer that a message was handed out by, if it wants to be acknowledged and is no passing reader."""
        if self.verb not in (b"MSG", b"HMSG") or not self.reply.startswith(_ACK):
            return b""
        name = self.reply.split(b".", 4)[3]
        return b"" if _is_reader(name) else name


class FrameSplitter:
    """Cuts what comes over a connection into frames."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[Frame]:
        """The frames that are complete now."""
        buffer = self._rest + data
        frames: list[Frame] = []
        start = 0
        while (frame := _frame_at(buffer, start)) is not None:
            frames.append(frame)
            start += len(frame.raw)
        self._rest = buffer[start:]
        return frames


def _frame_at(buffer: bytes, start: int) -> Frame | None:
    end = buffer.find(b"\r\n", start)
    if end < 0:
        return None
    words = buffer[start:end].split()
    verb = words[0].upper() if words else b""
    if verb not in _WITH_PAYLOAD:
        return Frame(buffer[start : end + 2], verb)
    after = end + 2 + int(words[-1]) + 2
    if len(buffer) < after:
        return None
    # PUB subject [reply] size · HPUB subject [reply] head size · MSG subject sid [reply] size · HMSG subject sid [reply] head size
    fixed = {b"PUB": 3, b"HPUB": 4, b"MSG": 4, b"HMSG": 5}[verb]
    before_reply = 3 if verb in (b"MSG", b"HMSG") else 2
    reply = words[before_reply] if len(words) > fixed else b""
    return Frame(buffer[start:after], verb, words[1], reply)


def _is_reader(name: bytes) -> bool:
    """Readers' consumers are named r and 16 hex digits."""
    return len(name) == 17 and name[:1] == b"r" and all(digit in b"0123456789abcdef" for digit in name[1:])


class WholeReads:
    """Of a protocol that is not looked into: each read is a frame."""

    def feed(self, data: bytes) -> list[Frame]:
        """The bytes as they came."""
        return [Frame(raw=data, verb=b"")]
