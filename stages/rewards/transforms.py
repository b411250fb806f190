"""From the raw score to the training reward: thresholds and the user's own transforms. Pure.

transform(score, row[, threshold]) must be finite; without a transform a threshold gives 1.0 or 0.0; else the score.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from typing import cast

import msgspec

from pipeline.errors import ContractError, RefusedError
from pipeline.functions import load_function
from schemas.config_arena import StreamConfig
from schemas.errors import ConfigError

Transform = Callable[[float, Mapping[str, object]], float]
"""(raw score, row) → training reward."""


class StreamReward(msgspec.Struct, frozen=True, kw_only=True):
    """How one stream's scores become rewards."""

    transform: Transform | None
    threshold: float | None


def load_rewards(streams: Mapping[str, StreamConfig]) -> dict[str, StreamReward]:
    """The rewards of all streams, with the user's transforms imported.

    Raises:
        ConfigError: a transform can't be imported or takes other arguments.
    """
    return {
        name: StreamReward(
            transform=_import_transform(f"streams.{name}.reward_transform", stream)
            if stream.reward_transform
            else None,
            threshold=stream.reward_threshold,
        )
        for name, stream in streams.items()
    }


def training_reward(score: float, row: Mapping[str, object], reward: StreamReward) -> float:
    """The training reward of a raw score.

    Raises:
        RefusedError: the transform gave no finite number.
        ContractError: the transform raised.
    """
    if reward.transform is not None:
        try:
            value = float(reward.transform(score, row))
        except Exception as error:
            raise ContractError(f"reward transform failed on score {score} of {dict(row)}: {error!r}") from error
        if not math.isfinite(value):
            raise RefusedError(f"reward transform gave {value} for score {score}: expected a finite number")
        return value
    if reward.threshold is not None:
        return 1.0 if score >= reward.threshold else 0.0
    return score


def _import_transform(path: str, stream: StreamConfig) -> Transform:
    function = load_function(path, stream.reward_transform)
    takes = len(inspect.signature(function).parameters)
    # cast: a user's function; training_reward checks what it gives
    call = cast("Callable[..., float]", function)
    if takes == 2:
        return call
    if takes == 3 and stream.reward_threshold is not None:
        threshold = stream.reward_threshold
        return lambda score, row: call(score, row, threshold)
    expected = "(score, row)" if stream.reward_threshold is None else "(score, row) or (score, row, threshold)"
    raise ConfigError(f"{path}: {stream.reward_transform!r} takes {takes} arguments: expected {expected}")
