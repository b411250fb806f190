"""Reads of a long conversation only what is new: agents send the whole history with every turn.

A body that begins with the very bytes of a former one, up to the end of some message, says the same up to there. Those messages are cut out
before the body is parsed, and matching goes on from their digest. Only digests of bytes are kept, no bodies.

Whether the shortcut holds is judged afterwards (`holds`): the tools, the outer system text and a recorded answer among the new messages must
agree; otherwise the whole body is parsed.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

import msgspec
import numpy as np
import xxhash

from stages.gateway.conversation import Call, Protocol_
from stages.gateway.errors import InvalidRequestError
from stages.gateway.forest import Match
from stages.gateway.matching import Digest, root_digest
from stages.gateway.settings import GatewayLimits

_TAIL: Final = 32
_MAX_KEPT: Final = 16
_LIST_FIELD: Final[dict[Protocol_, str]] = {
    "chat_completions": "messages",
    "messages": "messages",
    "responses": "input",
}


class Shortcut(msgspec.Struct, frozen=True, kw_only=True):
    """The end of some message of a former body."""

    protocol: Protocol_
    start: int
    """Bytes before the first message."""
    end: int
    """Bytes up to the end of the last message that is cut out."""
    tail: bytes
    """The last of those bytes: tells most other bodies apart at once."""
    bytes_digest: Digest
    skipped: int
    """Messages (gathered ones) that are cut out."""
    known: Digest
    """Digest of the conversation up to there."""
    root: Digest
    outer: Digest


class Cut(msgspec.Struct, frozen=True, kw_only=True):
    """A body with a shortcut's messages cut out."""

    shortcut: Shortcut
    body: bytes
    num_removed: int
    """Bytes."""


class _Messages(msgspec.Struct):
    messages: list[msgspec.Raw]


class _Input(msgspec.Struct):
    input: list[msgspec.Raw]


_messages: Final = msgspec.json.Decoder(_Messages)
_input: Final = msgspec.json.Decoder(_Input)


class Shortcuts:
    """A session's shortcuts, the least recently used forgotten first."""

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[Digest, int], Shortcut] = OrderedDict()

    def find(self, protocol: Protocol_, body: bytes) -> Cut | None:
        """The body without the longest known beginning of its conversation."""
        for key, one in sorted(self._kept.items(), key=lambda item: -item[1].end):
            if one.protocol != protocol or body[one.end - _TAIL : one.end] != one.tail:
                continue
            follows = one.end
            while follows < len(body) and body[follows] in b" \t\r\n":
                follows += 1
            if body[follows : follows + 1] != b"," or _bytes_digest(body, one.end) != one.bytes_digest:
                continue
            self._kept.move_to_end(key)
            short = body[: one.start] + body[follows + 1 :]
            return Cut(shortcut=one, body=short, num_removed=follows + 1 - one.start)
        return None

    def keep(self, call: Call, match: Match, body: bytes, cut: Cut | None) -> None:
        """Remember where the conversation of a body stands: after its last message, and after the one before.

        The one before serves clients that mark their last message and unmark it the next time (Claude Code's cache_control).
        """
        if not call.num_last:
            return
        read = body if cut is None else cut.body
        elements = _input.decode(read).input if call.protocol == "responses" else _messages.decode(read).messages
        removed = 0 if cut is None else cut.num_removed
        start = _offset(read, elements[0]) if cut is None else cut.shortcut.start
        hashed, hasher = 0, xxhash.xxh3_128()
        for element, later in (*(((elements[-2], call.num_last),) if len(elements) > 1 else ()), (elements[-1], 0)):
            count = len(call.messages) - later
            if not call.skipped and not any(one.role == "assistant" for one in call.messages[:count]):
                continue
            end = _offset(read, element) + memoryview(element).nbytes + removed
            hasher.update(memoryview(body)[hashed:end])
            hashed = end
            known = match.trail[count - 1] if count else call.known
            shortcut = Shortcut(
                protocol=call.protocol,
                start=start,
                end=end,
                tail=body[max(0, end - _TAIL) : end],
                bytes_digest=hasher.digest(),
                skipped=call.skipped + count,
                known=known,
                root=root_digest(call.tools),
                outer=outer_digest(call),
            )
            self._kept[shortcut.bytes_digest, end] = shortcut
        while len(self._kept) > _MAX_KEPT:
            self._kept.popitem(last=False)


def resumed(call: Call, cut: Cut, limits: GatewayLimits) -> Call:
    """The call of a cut body, which knows what was cut out.

    Raises:
        InvalidRequestError: more messages than allowed, all counted.
    """
    skipped = cut.shortcut.skipped
    if skipped + len(call.messages) > limits.max_messages:
        raise InvalidRequestError(
            f"messages: expected at most {limits.max_messages}, found {skipped + len(call.messages)}"
        )
    return msgspec.structs.replace(call, skipped=skipped, known=cut.shortcut.known)


def holds(call: Call, match: Match, cut: Cut) -> bool:
    """Whether a resumed call says the same as the whole body would."""
    same = cut.shortcut.root == root_digest(call.tools) and cut.shortcut.outer == outer_digest(call)
    return same and match.parent is not None and not match.broken


def outer_digest(call: Call) -> Digest:
    """Of the system text that stands outside the messages."""
    return xxhash.xxh3_128_digest("\0".join(call.outer_system).encode("utf-8", "surrogatepass"))


def _bytes_digest(body: bytes, end: int) -> Digest:
    return xxhash.xxh3_128_digest(memoryview(body)[:end])


def _offset(body: bytes, element: msgspec.Raw) -> int:
    """Where an element of a decoded body begins in it."""
    return _address(element) - _address(body)


def _address(data: bytes | msgspec.Raw) -> int:
    return int(np.frombuffer(data, dtype=np.uint8).__array_interface__["data"][0])
