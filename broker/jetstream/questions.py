"""Questions that wait for their answer: when each is asked again, and when it ends without one. Pure but for the future.

A question may reach nobody: while a cluster elects a leader, servers take it in silence. So it is asked again, each time with
twice the patience, up to a limit; an answer to any of its askings counts, so a server that is only slow is not asked in vain.
It must not know connections.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Final

import msgspec

HURRY_S: Final = 0.25
"""A new leader hears at once what waited for it, and again so soon: it is told of before it listens."""


class Answer(msgspec.Struct, frozen=True, gc=False):
    """What came back on a question."""

    data: bytes | memoryview
    """Large data is a read-only memoryview of the buffer it was received into."""
    headers: bytes | None
    times_asked: int = 1
    """More than 1: an earlier asking may have been acted on, too."""


class Again(msgspec.Struct, frozen=True):
    """When a question without an answer is asked again."""

    first_s: float
    most_s: float
    """The patience is doubled each time, up to this."""


class Question:
    """A question that waits for its answer."""

    __slots__ = (
        "_again_s",
        "_most_s",
        "_patience_s",
        "future",
        "parts",
        "subject",
        "times_asked",
        "until_s",
    )

    def __init__(
        self,
        subject: str,
        parts: tuple[bytes | memoryview, ...],
        *,
        now_s: float,
        timeout_s: float,
        again: Again | None,
    ) -> None:
        self.future: Final[asyncio.Future[Answer]] = asyncio.get_running_loop().create_future()
        self.subject: Final = subject
        self.parts: Final = parts
        """The whole command, to be sent as it is."""
        self.until_s: Final = now_s + timeout_s
        self.times_asked = 0
        self._patience_s = float("inf") if again is None else again.first_s
        self._most_s: Final = float("inf") if again is None else again.most_s
        self._again_s = now_s

    def asked(self, now_s: float) -> None:
        """It was sent."""
        self.times_asked += 1
        self._again_s = now_s + self._patience_s
        self._patience_s = min(2 * self._patience_s, self._most_s)

    def is_due(self, now_s: float) -> bool:
        """Whether to ask it again now."""
        return now_s >= self._again_s and not self.future.done()

    def hurry(self, now_s: float) -> None:
        """Somebody may listen now who did not before."""
        if self._patience_s < float("inf"):
            self._again_s, self._patience_s = now_s, min(HURRY_S, self._most_s)

    def answer(self, data: bytes | memoryview, headers: bytes | None) -> None:
        """It is answered."""
        if not self.future.done():
            self.future.set_result(Answer(data, headers, self.times_asked))

    def fail(self, error: Exception) -> None:
        """End it without an answer."""
        if not self.future.done():
            self.future.set_exception(error)


def concerning(questions: Iterable[Question], stream: str, prefix: str, consumer: str) -> list[Question]:
    """The questions that a new leader of a stream, or of one of its consumers, has to answer.

    Args:
        questions: all that wait.
        stream: the stream.
        prefix: of the subjects that it stores.
        consumer: of this stream; empty: it is the stream that has a new leader.
    """
    name = f".{stream}.{consumer}." if consumer else f".{stream}."
    return [
        question
        for question in questions
        if name in f"{question.subject}." or (not consumer and question.subject.startswith(prefix))
    ]
