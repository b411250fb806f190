"""The recorded calls of one session as a forest, by their exact tokens.

A call extends the deepest recorded call whose whole conversation (messages and answer) is a prefix of its own; it then reuses that
chain's ids as they were sampled. Everything else starts or forks a chain: compaction, sub-agents, retries, edited histories.

A chain's ids stand once in memory: nodes are slices of a growing buffer, and a fork copies its prefix. Texts are not kept, only
digests. Knows no protocol, no engine, no log.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

import msgspec
import numpy as np
import xxhash

from stages.gateway.conversation import Call, Message
from stages.gateway.matching import Digest, extend_digest, message_digest, root_digest
from stages.ports import TokenIds

_GROWTH: Final = 1.25
_SPARE: Final = 256


class _Buffer:
    """Ids of one chain, [capacity] int32, of which `length` are written."""

    __slots__ = ("ids", "length")

    def __init__(self, ids: TokenIds) -> None:
        self.ids = ids
        self.length = int(ids.size)

    def append(self, more: TokenIds) -> None:
        needed = self.length + int(more.size)
        if needed > self.ids.size:
            grown = np.empty(int(needed * _GROWTH) + _SPARE, dtype=np.int32)
            grown[: self.length] = self.ids[: self.length]
            self.ids = grown
        self.ids[self.length : needed] = more
        self.length = needed


class Node:
    """One recorded call."""

    __slots__ = ("after", "buffer", "call_ids", "end", "ended", "interaction_id", "ordinal", "reasoning", "text_length")

    def __init__(
        self,
        *,
        ordinal: int,
        buffer: _Buffer,
        end: int,
        after: Digest,
        ended: bool,
        answer: Message,
        text_length: int,
        interaction_id: str,
    ) -> None:
        self.ordinal = ordinal
        self.interaction_id = interaction_id
        self.buffer = buffer
        self.end = end
        """Tokens of the chain up to and with this call's completion."""
        self.after = after
        """Digest of the conversation with the answer; of the raw text or ids for completions."""
        self.ended = ended
        """Whether the completion's last token ends a turn."""
        self.call_ids = tuple(call.id for call in answer.calls)
        self.reasoning = _reasoning_digest(answer.reasoning)
        self.text_length = text_length
        """completions: characters (or ids) of prompt and answer; -1 for conversations."""

    def ids(self) -> TokenIds:
        """The chain up to and with this call, [end] int32 (a view)."""
        return self.buffer.ids[: self.end]


class Match(msgspec.Struct, frozen=True, kw_only=True):
    """Where a call belongs."""

    parent: Node | None
    num_known: int
    """Messages (or characters, or ids of a raw prompt) that the parent's chain already holds."""
    before: Digest
    """Digest of the call's whole input."""
    trail: tuple[Digest, ...] = ()
    """Digest of the conversation after each of the call's messages."""
    broken: bool
    """The call comes with a model's answer that no recorded chain holds: the history was rewritten."""


def new_messages(call: Call, match: Match) -> tuple[Message, ...]:
    """The messages that the call's chain does not hold yet."""
    return call.messages[max(0, match.num_known - call.skipped) :]


class Forest:
    """All recorded calls of a session."""

    def __init__(self) -> None:
        self._after: dict[Digest, list[Node]] = {}
        self._raw: OrderedDict[int, int] = OrderedDict()
        """Lengths of raw prompts with their answers → how many nodes have it."""
        self._first_ids: set[int] = set()
        self.nodes: list[Node] = []
        self.prefix_breaks = 0

    def match(self, call: Call) -> Match:
        """Find the call's place. Cost: one digest per message."""
        return self._match_raw(call.prompt) if call.prompt is not None else self._match_messages(call)

    def _match_messages(self, call: Call) -> Match:
        tools = {tool.name: tool for tool in call.tools}
        digest = call.known or root_digest(call.tools)
        parent: Node | None = None
        num_known = 0
        last_answer = 0
        trail: list[Digest] = []
        for position, message in enumerate(call.messages, start=call.skipped):
            digest = extend_digest(digest, message_digest(message, tools))
            trail.append(digest)
            if message.role == "assistant":
                last_answer = position + 1
                found = _choose(self._after.get(digest, ()), message)
                if found is not None:
                    parent, num_known = found, position + 1
        broken = last_answer > num_known
        return Match(parent=parent, num_known=num_known, before=digest, trail=tuple(trail), broken=broken)

    def _match_raw(self, prompt: str | tuple[int, ...]) -> Match:
        kind, data = (b"text", prompt) if isinstance(prompt, str) else (b"ids", np.asarray(prompt, dtype=np.int32))
        for length in sorted(self._raw, reverse=True):
            nodes = self._after.get(raw_digest(kind, data[:length])) if length <= len(data) else None
            if nodes:
                return Match(parent=nodes[-1], num_known=length, before=raw_digest(kind, data), broken=False)
        broken = not isinstance(data, str) and len(data) > 0 and int(data[0]) in self._first_ids
        return Match(parent=None, num_known=0, before=raw_digest(kind, data), broken=broken)

    def prompt(self, match: Match, new_ids: TokenIds) -> TokenIds:
        """The ids that the engine gets: the parent's chain as recorded, then what is new."""
        return new_ids if match.parent is None else np.concatenate((match.parent.ids(), new_ids))

    def add(
        self,
        match: Match,
        call: Call,
        *,
        new_ids: TokenIds,
        completion: TokenIds,
        answer: Message,
        ended: bool,
        interaction_id: str,
    ) -> Node:
        """Append a recorded call; its ordinal is the number of calls before it."""
        buffer = self._buffer_after(match.parent)
        buffer.append(new_ids)
        buffer.append(completion)
        after, text_length = self._after_digest(match, call, completion, answer)
        node = Node(
            ordinal=len(self.nodes),
            buffer=buffer,
            end=buffer.length,
            after=after,
            ended=ended,
            answer=answer,
            text_length=text_length,
            interaction_id=interaction_id,
        )
        self.nodes.append(node)
        self._after.setdefault(after, []).append(node)
        if text_length >= 0:
            self._raw[text_length] = self._raw.get(text_length, 0) + 1
            self._first_ids.add(int(buffer.ids[0]))
        return node

    def _buffer_after(self, parent: Node | None) -> _Buffer:
        if parent is None:
            return _Buffer(np.empty(0, dtype=np.int32))
        if parent.buffer.length == parent.end:
            return parent.buffer
        return _Buffer(parent.ids().copy())

    def _after_digest(self, match: Match, call: Call, completion: TokenIds, answer: Message) -> tuple[Digest, int]:
        if call.prompt is None:
            tools = {tool.name: tool for tool in call.tools}
            return extend_digest(match.before, message_digest(answer, tools)), -1
        if isinstance(call.prompt, str):
            whole = call.prompt + answer.text
            return raw_digest(b"text", whole), len(whole)
        ids = np.concatenate((np.asarray(call.prompt, dtype=np.int32), completion))
        return raw_digest(b"ids", ids), int(ids.size)


def raw_digest(kind: bytes, data: str | TokenIds) -> Digest:
    """Digest of a raw prompt: of its text, or of its ids."""
    return xxhash.xxh3_128_digest(
        kind + (data.encode("utf-8", "surrogatepass") if isinstance(data, str) else data.tobytes())
    )


def _reasoning_digest(reasoning: str) -> Digest:
    return xxhash.xxh3_64_digest(reasoning.strip().encode("utf-8", "surrogatepass"))


def _choose(nodes: list[Node] | tuple[()], echoed: Message) -> Node | None:
    """The latest of the equal answers that the client can mean: ids and reasoning agree where it sent them."""
    ids = tuple(call.id for call in echoed.calls)
    for node in reversed(nodes):
        if ids != node.call_ids and any(ids):
            continue
        if echoed.reasoning and _reasoning_digest(echoed.reasoning) != node.reasoning:
            continue
        return node
    return None
