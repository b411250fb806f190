"""What a request's tool_choice asks for, checked against the tools that came with it. Knows no protocol's form of it."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

import msgspec

from stages.gateway.errors import InvalidRequestError

WORDS: Final = ("none", "auto", "required")
_SHOWN: Final = 10


class Chosen(msgspec.Struct, frozen=True, kw_only=True):
    """How tools may be used, in the internal form."""

    choice: str | None = None
    """auto | none | required | the name of a tool."""
    allowed: tuple[str, ...] | None = None
    """Names of the tools that may be called; None: all."""


def unknown_choice(forms: str, found: str) -> InvalidRequestError:
    """The error for a word or a type that the protocol does not have."""
    return InvalidRequestError(f"tool_choice: expected {forms}, found {found!r}; send one of those, or leave it out")


def expect_tools(choice: str, tools: Collection[str]) -> None:
    """Whether there are tools for a choice that needs some.

    Raises:
        InvalidRequestError: there are none.
    """
    if not tools:
        raise InvalidRequestError(
            f"tool_choice: expected tools beside {choice!r}, found none; send tools, or leave tool_choice out"
        )


def chosen_word(word: str, tools: Collection[str], forms: str) -> Chosen:
    """One of `WORDS`.

    Args:
        word: what was sent.
        tools: names of the tools that came with it, those that are not served too.
        forms: what the protocol takes, for the error.

    Raises:
        InvalidRequestError: another word, or tools are required where there are none.
    """
    if word not in WORDS:
        raise unknown_choice(forms, word)
    if word == "required":
        expect_tools(word, tools)
    return Chosen(choice=word)


def chosen_tool(name: str, tools: Collection[str]) -> Chosen:
    """One tool by its name.

    Raises:
        InvalidRequestError: it is none of the tools.
    """
    expect_tools(name, tools)
    _expect_known(name, tools)
    return Chosen(choice=name)


def chosen_of_allowed(mode: str, names: Collection[str], tools: Collection[str]) -> Chosen:
    """Some of the tools.

    Raises:
        InvalidRequestError: no mode, no names, or a name that is none of the tools.
    """
    if mode not in ("auto", "required"):
        raise InvalidRequestError(f"tool_choice: expected allowed_tools with mode auto or required, found {mode!r}")
    if not names:
        raise InvalidRequestError(
            "tool_choice: expected allowed_tools with at least one tool, found none; to allow none send 'none'"
        )
    expect_tools("allowed_tools", tools)
    for name in names:
        _expect_known(name, tools)
    return Chosen(choice=mode, allowed=tuple(names))


def _expect_known(name: str, tools: Collection[str]) -> None:
    if name not in tools:
        known = sorted(tools)
        shown = ", ".join(known[:_SHOWN]) + (", …" if len(known) > _SHOWN else "")
        raise InvalidRequestError(
            f"tool_choice: expected the name of one of the tools ({shown}), found {name!r}; name one of them, or send it in tools"
        )
