"""The two streams of the first run: small enough for a tiny character-level policy."""

from __future__ import annotations

from ops.arena.config import ArenaServerConfig, HarnessKind, HarnessSpec, StreamSpec

QUICKSTART_STREAMS = (
    StreamSpec(
        stream_id="reverse",
        dataset="spell_backward",
        dataset_options={"min_word_len": 3, "max_word_len": 4},
        size=512,
        seed=11,
        turns=("reverse {word}",),
        lowercase=True,
        scorer="partial",
        harness="openai-loop@1",
        reward_key="letters-in-place",
        domain="reverse",
    ),
    StreamSpec(
        stream_id="reverse-checked",
        dataset="spell_backward",
        dataset_options={"min_word_len": 3, "max_word_len": 3},
        size=512,
        seed=23,
        turns=("reverse {word}", "check {word} {reply}"),
        lowercase=True,
        scorer="exact",
        harness="openai-two-turn@1",
        reward_key="whole-word",
        domain="reverse-checked",
    ),
)
"""One call with partial credit, and two calls where only the whole word counts; meant for weights 3:1."""

QUICKSTART_HARNESSES = (
    HarnessSpec(key="openai-loop", kind=HarnessKind.OPENAI_LOOP, max_tokens=16),
    HarnessSpec(key="openai-two-turn", kind=HarnessKind.OPENAI_TWO_TURN, max_tokens=16),
)


def quickstart_config() -> ArenaServerConfig:
    """The Arena of the first run, on a port that the system chooses."""
    return ArenaServerConfig(streams=QUICKSTART_STREAMS, harnesses=QUICKSTART_HARNESSES)
