"""What `headrace tap PATTERN` listens to: a pattern over topics and keys, refused when it could match nothing."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Final

import msgspec

from schemas.errors import InvalidIdError
from schemas.subjects import PREFIX, Topic, check_filter
from schemas.topics import TOPICS

_PREFIX_TOKENS: Final = 2


class Pattern(msgspec.Struct, frozen=True, kw_only=True):
    """A filter, and the topics it can match."""

    filter: str
    topics: tuple[str, ...]


def parse_pattern(text: str, run: str) -> Pattern:
    """The filter that a person means. `episode` = all topics that begin so, `episode.ended` = all its keys,
    `episode.ended.g0000012.>` = some of them, `hr.<run>.…` = as it stands.

    Raises:
        InvalidIdError: it could match nothing; the text says what could.
    """
    tokens = text.strip().split(".")
    if tokens[0] == PREFIX:
        if len(tokens) < _PREFIX_TOKENS + 1 or tokens[1] not in (run, "*"):
            raise InvalidIdError(f"{text!r} can match nothing here: expected '{PREFIX}.{run}.…'")
        tokens = tokens[_PREFIX_TOKENS:]
    if tokens == [""]:
        raise InvalidIdError("an empty pattern matches nothing: '>' is the whole log")
    if len(tokens) == 1 and tokens[0] != ">":
        tokens.append("*")
    if len(tokens) == 2 and tokens[-1] != ">":
        tokens.append(">")
    check_filter(".".join(tokens))
    found = tuple(topic.name for topic in TOPICS if _can_match(tokens, topic))
    if not found:
        raise InvalidIdError(_nothing(text, tokens))
    return Pattern(filter=".".join([PREFIX, run, *tokens]), topics=found)


def named_runs(patterns: Sequence[str]) -> list[str]:
    """The runs that patterns of the form `hr.<run>.…` name, each once."""
    tokens = [text.strip().split(".") for text in patterns]
    named = (parts[1] for parts in tokens if parts[0] == PREFIX and len(parts) > _PREFIX_TOKENS)
    return list(dict.fromkeys(run for run in named if run not in ("*", ">")))


def _can_match(tokens: list[str], topic: Topic[msgspec.Struct]) -> bool:
    have = topic.name.split(".")
    num_keys = len(topic.key_fields.split("."))
    for index, token in enumerate(tokens):
        if token == ">":
            return index < len(have) + num_keys
        if index < len(have) and token not in ("*", have[index]):
            return False
    return len(tokens) == len(have) + num_keys


def _nothing(text: str, tokens: list[str]) -> str:
    names = [topic.name for topic in TOPICS]
    name = ".".join(tokens[:2]).removesuffix(".*").removesuffix(".>")
    same = [topic for topic in TOPICS if topic.name == name]
    if same:
        keys = len(same[0].key_fields.split("."))
        return (
            f"{text!r} can match nothing: the key of {name} has {keys} part{'s' * (keys != 1)} ({same[0].key_fields}), "
            f"found {len(tokens) - 2}; try '{name}.>'"
        )
    close = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    nouns = difflib.get_close_matches(tokens[0], sorted({topic.split(".")[0] for topic in names}), n=2, cutoff=0.6)
    hints = close or [f"{noun}.>" for noun in nouns]
    hint = f"did you mean {' or '.join(hints)}?" if hints else f"topics: {', '.join(names)}"
    return f"{text!r} can match nothing: there is no such topic; {hint}"
