"""What the Arena's server and its harness processes say to each other, one JSON line each way per episode."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

import msgspec

from ops.arena.config import HarnessSpec

LINE_LIMIT_BYTES = 16 << 20
"""Longest job line; prompts are short, environments may hold a few large values."""


class TaskTexts(msgspec.Struct, frozen=True, kw_only=True):
    """What a harness is given."""

    turns: tuple[str, ...]
    """User texts; from the second on `{reply}` stands for the model's answer before."""
    answer: str
    """The right answer, for scripted harnesses only."""


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """One episode for a harness."""

    job_id: str
    harness: HarnessSpec
    texts: TaskTexts
    max_turns: int
    envs: dict[str, str]
    """As launched, with MODEL_NAME, BASE_URL and API_KEY set by the Arena."""


class End(StrEnum):
    """How a harness ended."""

    OK = "ok"
    NO_OUTPUT = "no_output"
    TIMEOUT = "timeout"
    HARNESS_FAILED = "harness_failed"
    SETUP_FAILED = "setup_failed"


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What came of a job."""

    job_id: str
    end: End
    reply: str = ""
    """The last thing the model (or the command) said, also after a timeout."""
    num_calls: int = 0
    """Model calls that were answered."""
    error_type: str = ""
    """Such as `context_length_exceeded` or `max_turns`, where the harness ended with an error of the agent's own."""
    message: str = ""


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    """Where and as whom a harness calls the model."""

    base_url: str
    api_key: str
    model: str
    headers: dict[str, str]


def openai_endpoint(envs: Mapping[str, str]) -> Endpoint:
    """The OpenAI endpoint of an episode; OPENAI_BASE_URL (the direct route) goes before the Arena's own gateway."""
    return Endpoint(
        base_url=envs.get("OPENAI_BASE_URL") or envs["BASE_URL"] + "/v1",
        api_key=envs.get("OPENAI_API_KEY") or envs["API_KEY"],
        model=envs["MODEL_NAME"],
        headers=custom_headers(envs.get("OPENAI_CUSTOM_HEADERS", "")),
    )


def anthropic_endpoint(envs: Mapping[str, str]) -> Endpoint:
    """The Anthropic endpoint of an episode; ANTHROPIC_BASE_URL (the direct route) goes before the Arena's own gateway."""
    key = envs.get("ANTHROPIC_API_KEY") or envs.get("ANTHROPIC_AUTH_TOKEN") or envs["API_KEY"]
    return Endpoint(
        base_url=envs.get("ANTHROPIC_BASE_URL") or envs["BASE_URL"],
        api_key=key,
        model=envs["MODEL_NAME"],
        headers=custom_headers(envs.get("ANTHROPIC_CUSTOM_HEADERS", "")),
    )


def custom_headers(text: str) -> dict[str, str]:
    """`Name: value` lines, as Claude Code reads them from ANTHROPIC_CUSTOM_HEADERS."""
    headers: dict[str, str] = {}
    for line in text.splitlines():
        name, colon, value = line.partition(":")
        if colon and name.strip():
            headers[name.strip()] = value.strip()
    return headers
