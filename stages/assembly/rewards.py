"""From raw rewards to the values that estimators see: penalties, bias, scale, clip, turn returns, several objectives.

Order: overlong penalty → length penalty → clip((reward + bias) · scale, ±clip). Normalisation comes after
(`normalization`). Pure float64; knows no message and no token, only counts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from stages.assembly import moments


class Overlong(msgspec.Struct, frozen=True, kw_only=True):
    """Linear penalty for answers that reach into the last `buffer_tokens` before `max_tokens`; it keeps growing
    beyond.
    """

    max_tokens: int
    buffer_tokens: int
    factor: float = 1.0


class LengthPenalty(msgspec.Struct, frozen=True, kw_only=True):
    """Shares of the group's mean reward that its most costly slot loses; others lose in proportion to their cost."""

    output_tokens_weight: float = 0.0
    input_tokens_weight: float = 0.0
    turns_weight: float = 0.0


class Cost(msgspec.Struct, frozen=True, kw_only=True):
    """What one slot used up."""

    num_output_tokens: int
    num_input_tokens: int
    num_turns: int


def overlong_penalty(num_tokens: int, overlong: Overlong) -> float:
    """What to add to the reward of an answer of `num_tokens`: 0 or negative."""
    into_buffer = num_tokens - (overlong.max_tokens - overlong.buffer_tokens)
    return min(-into_buffer / overlong.buffer_tokens * overlong.factor, 0.0)


def length_penalties(rewards: Sequence[float], costs: Sequence[Cost], penalty: LengthPenalty) -> list[float]:
    """What to add to each reward of one group."""
    output = max(1, *(cost.num_output_tokens for cost in costs))
    given = max(1, *(cost.num_input_tokens for cost in costs))
    turns = max(1, *(cost.num_turns for cost in costs))
    share = moments.mean(rewards)
    return [
        -share
        * (
            penalty.output_tokens_weight * cost.num_output_tokens / output
            + penalty.input_tokens_weight * cost.num_input_tokens / given
            + penalty.turns_weight * cost.num_turns / turns
        )
        for cost in costs
    ]


def shape(reward: float, *, bias: float = 0.0, scale: float = 1.0, clip: float | None = None) -> float:
    """clip((reward + bias) · scale, ±clip); no clip without one."""
    shaped = (reward + bias) * scale
    return shaped if clip is None else max(-clip, min(clip, shaped))


def discounted_returns(rewards: Sequence[float], discount: float) -> list[float]:
    """Of rewards in the order of turns, each turn's own plus `discount` times the return of the next."""
    returns = [0.0] * len(rewards)
    following = 0.0
    for index in range(len(rewards) - 1, -1, -1):
        following = rewards[index] + discount * following
        returns[index] = following
    return returns


def weighted_reward(objectives: Sequence[float | None], weights: Sequence[float]) -> float | None:
    """The weighted sum of the objectives that were scored; None where none was: abstaining is not a reward of 0."""
    scored = [
        weight * value
        for value, weight in zip(objectives, weights, strict=True)
        if value is not None and not math.isnan(value)
    ]
    return math.fsum(scored) if scored else None
