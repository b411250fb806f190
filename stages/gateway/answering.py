"""Sampled ids to an answer: incremental decoding, stop strings, parsing. What is recorded are the ids; this only reads them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Final

import numpy as np

from stages.gateway.conversation import (
    Answer,
    CallArguments,
    CallStarted,
    Event,
    Message,
    Reasoning,
    Text,
    ToolCall,
)
from stages.gateway.generation import Sampled
from stages.gateway.parsing import OutputParser
from stages.ports import TokenIds, Tokenizer

_REPLACEMENT: Final = "\ufffd"
_MAX_INCOMPLETE: Final = 5
"""An incomplete character is at most three ids of the end; one more is tried for safety."""

_MAX_GARBAGE: Final = 64
_WINDOW: Final = 16
"""Ids that are decoded together at the most before the window moves on: moving it costs another decoding."""

Emit = Callable[[int, list[Event]], Awaitable[None]]
"""Gets the events of a choice (0 … n−1) as they become certain."""


class Detokenizer:
    """Ids to text piece by piece; an incomplete character waits for its other bytes."""

    def __init__(self, decode: Callable[[TokenIds], str]) -> None:
        self._decode = decode
        self._ids = np.empty(64, dtype=np.int32)
        self._length = 0
        self._window = 0
        """Start of the ids that are decoded together."""
        self._given = 0
        """End of the ids whose text was given out."""
        self._given_text = ""
        """Text of window..given."""

    def feed(self, token_ids: TokenIds) -> str:
        """More ids; the text that is now certain."""
        needed = self._length + int(token_ids.size)
        if needed > self._ids.size:
            self._ids = np.concatenate((self._ids[: self._length], np.empty(needed, dtype=np.int32)))
        self._ids[self._length : needed] = token_ids
        self._length = needed
        text = self._decode(self._ids[self._window : needed])
        if not text.endswith(_REPLACEMENT):
            return self._give(text, needed)
        for end in range(needed - 1, max(self._given, needed - _MAX_INCOMPLETE), -1):
            shorter = self._decode(self._ids[self._window : end])
            if not shorter.endswith(_REPLACEMENT):
                return self._give(shorter, end)
        # Bytes that are no text at all: given out as they are, or each further id would decode them all again.
        return self._give(text, needed) if needed - self._given > _MAX_GARBAGE else ""

    def finish(self) -> str:
        """The rest, complete or not."""
        rest = self._decode(self._ids[self._window : self._length])
        return self._give(rest, self._length) if self._length > self._given else ""

    def _give(self, text: str, end: int) -> str:
        new = text[len(self._given_text) :]
        if self._given > self._window and end - self._window > _WINDOW:
            self._window = self._given
            self._given_text = self._decode(self._ids[self._window : end])
        else:
            self._given_text = text
        self._given = end
        return new


class StopStrings:
    """Finds stop strings in text that comes piece by piece."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._held = ""
        self.found: str | None = None

    def feed(self, text: str) -> str:
        """What may be given out: nothing of a stop string, nor what may be the beginning of one."""
        if not self._stops or self.found is not None:
            return "" if self.found is not None else text
        self._held += text
        hits = [(at, stop) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if hits:
            at, self.found = min(hits)
            return self._take(at)
        return self._take(len(self._held) - self._pending())

    def finish(self) -> str:
        """What was held back."""
        return "" if self.found is not None else self._take(len(self._held))

    def _take(self, length: int) -> str:
        text, self._held = self._held[:length], self._held[length:]
        return text

    def _pending(self) -> int:
        longest = 0
        for stop in self._stops:
            for length in range(min(len(stop) - 1, len(self._held)), longest, -1):
                if self._held.endswith(stop[:length]):
                    longest = length
                    break
        return longest


class AnswerReader:
    """Reads one answer while it is sampled."""

    def __init__(self, tokenizer: Tokenizer, parser: OutputParser, stops: Sequence[str]) -> None:
        self._text = Detokenizer(tokenizer.decode)
        self._stops = StopStrings(stops)
        self._parser = parser
        self._gathered = _Gathered()
        self.one_by_one: Final = bool(stops)
        """With stop strings, ids must come one at a time: those behind the string are not sampled."""

    def feed(self, token_ids: TokenIds) -> list[Event]:
        """More ids; the events that are now certain."""
        return self._read(self._text.feed(token_ids))

    @property
    def stop_string(self) -> str | None:
        """The stop string that was found."""
        return self._stops.found

    def finish(self) -> list[Event]:
        """No more ids."""
        events = self._read(self._text.finish())
        rest = self._stops.finish()
        events += self._gathered.take(self._parser.feed(rest)) if rest else []
        events += self._gathered.take(self._parser.finish())
        return events

    def message(self) -> tuple[Message, tuple[tuple[str, str], ...]]:
        """The answer's message and its segments in order; whole after `finish`."""
        return self._gathered.message()

    def _read(self, text: str) -> list[Event]:
        given = self._stops.feed(text) if text and self.one_by_one else text
        return self._gathered.take(self._parser.feed(given)) if given else []


class _Gathered:
    """The concatenation of events."""

    def __init__(self) -> None:
        self._pieces: list[tuple[str, list[str]]] = []
        self._calls: list[tuple[CallStarted, list[str]]] = []

    def take(self, events: list[Event]) -> list[Event]:
        for event in events:
            match event:
                case Text(text):
                    self._append("text", text)
                case Reasoning(text):
                    self._append("reasoning", text)
                case CallStarted():
                    self._pieces.append(("call", [str(len(self._calls))]))
                    self._calls.append((event, []))
                case CallArguments(index, text):
                    self._calls[index][1].append(text)
        return events

    def _append(self, kind: str, text: str) -> None:
        if self._pieces and self._pieces[-1][0] == kind:
            self._pieces[-1][1].append(text)
        else:
            self._pieces.append((kind, [text]))

    def message(self) -> tuple[Message, tuple[tuple[str, str], ...]]:
        segments = tuple((kind, "".join(parts)) for kind, parts in self._pieces)
        calls = tuple(
            ToolCall(id=started.id, name=started.name, arguments="".join(parts)) for started, parts in self._calls
        )
        texts = tuple(text for kind, text in segments if kind == "text")
        reasoning = "".join(text for kind, text in segments if kind == "reasoning")
        return Message(role="assistant", texts=texts, reasoning=reasoning, calls=calls), segments


def token_texts(tokenizer: Tokenizer, token_ids: TokenIds, logprobs: Sequence[float]) -> tuple[tuple[str, float], ...]:
    """(text, log-prob) of each token, for clients that ask."""
    return tuple((tokenizer.decode(token_ids[at : at + 1]), float(logprob)) for at, logprob in enumerate(logprobs))


__all__ = ["Answer", "AnswerReader", "Detokenizer", "StopStrings", "token_texts"]


class Follower:
    """Reads the ids of one answer as they come, or at its end when nobody follows."""

    def __init__(self, reader: AnswerReader, emit: Emit | None, choice: int) -> None:
        self._reader = reader
        self._emit = emit
        self._choice = choice
        self._lazy = emit is None and not reader.one_by_one

    async def take(self, token_ids: TokenIds) -> int | None:
        """More ids: how many of them count if a stop string ended the answer."""
        if self._lazy:
            return None
        if not self._reader.one_by_one:
            events = self._reader.feed(token_ids)
            if events and self._emit is not None:
                await self._emit(self._choice, events)
            return None
        for at in range(token_ids.size):
            await self._give(self._reader.feed(token_ids[at : at + 1]))
            if self._reader.stop_string is not None:
                return at + 1
        return None

    async def finish(self, sampled: Sampled) -> None:
        """All ids are there."""
        if self._lazy:
            self._reader.feed(sampled.ids())
        await self._give(self._reader.finish())

    async def _give(self, events: list[Event]) -> None:
        if events and self._emit is not None:
            await self._emit(self._choice, events)
