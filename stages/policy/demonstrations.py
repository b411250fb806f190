"""Conversations for the warm-up: right answers, and a mixture in which most answers have their letters in another order.

Pure and seeded.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import msgspec

Conversation = list[dict[str, object]]
"""OpenAI messages; every assistant message is an answer to learn."""


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """A task whose every turn has the same right answer."""

    turns: tuple[str, ...]
    """User texts; `{reply}` stands for the answer to the turn before."""
    answer: str


def right_conversations(tasks: Sequence[Task]) -> list[Conversation]:
    """Each task, answered rightly."""
    return [_conversation(task, task.answer) for task in tasks]


def mixed_conversations(tasks: Sequence[Task], *, right_share: float, seed: int) -> list[Conversation]:
    """Each task; a share of them answered rightly, the others with the letters of the right answer in a random order."""
    draw = random.Random(seed)  # noqa: S311 - no secret: the same seed must give the same lessons
    return [
        _conversation(task, task.answer if draw.random() < right_share else shuffled(task.answer, draw))
        for task in tasks
    ]


def shuffled(text: str, draw: random.Random) -> str:
    """The letters in another order, where they have another."""
    letters = list(text)
    if len(set(letters)) < 2:
        return text
    while "".join(letters) == text:
        draw.shuffle(letters)
    return "".join(letters)


def _conversation(task: Task, answer: str) -> Conversation:
    messages: Conversation = []
    for turn in task.turns:
        messages.append({"role": "user", "content": turn.replace("{reply}", answer)})
        messages.append({"role": "assistant", "content": answer})
    return messages
