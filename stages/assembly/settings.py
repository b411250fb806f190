"""What assembly depends on besides the log: fixed for a run and checked before anything starts. Knows no message."""

from __future__ import annotations

import math
from enum import StrEnum

import msgspec

from schemas.errors import ConfigError
from stages.assembly.advantages import GROUP_ESTIMATORS, EstimatorSettings
from stages.assembly.normalization import Level, Normalization
from stages.assembly.rewards import LengthPenalty, Overlong
from stages.assembly.stall import StallSettings
from stages.assembly.weights import Aggregation, check_aggregation


class RowsPerSlot(StrEnum):
    """How many rows a slot may give."""

    ANY = "any"
    ONE = "one"


class StaleRule(StrEnum):
    """What goes when a row is too old at the moment of use."""

    SLOT = "slot"
    """The slots that are too old; the group stays if enough are left."""
    GROUP = "group"
    """The whole group."""


class AssemblySettings(msgspec.Struct, frozen=True, kw_only=True):
    """Membership, numbers and pacing of steps."""

    run: str
    groups_per_step: int
    slots_per_group: int
    mini_batch_groups: int | None = None
    """Groups of one optimizer step; None = the whole step."""
    dynamic_batch: bool = False
    """A step is made of the usable ones among `groups_per_step` groups that ended, not of as many usable ones."""
    min_shares: dict[str, float] = {}
    """stream → least share of a step's groups, while the stream has any under way."""
    max_staleness: int | None = None
    """(step - 1) - oldest version that a row may have when its step is assembled; None = any."""
    stale: StaleRule = StaleRule.SLOT
    min_usable_group_size: int | None = None
    """Usable slots that a group needs; None = derived, see `usable_minimum`."""
    drop_incomplete_groups: bool = False
    rows_per_slot: RowsPerSlot = RowsPerSlot.ANY
    mask_truncated: bool = False
    """Rows whose last answer ran out of its budget neither vote nor train."""
    filter_zero_spread: bool = False
    """Groups whose rewards are all the same are dropped."""
    min_accuracy: float | None = None
    """Groups with a smaller share of solved slots are dropped."""
    max_accuracy: float | None = None
    user_filters: tuple[str, ...] = ()
    """Import paths `package.module:function` of further filters, see `filters.UserFilter`."""
    reward_bias: float = 0.0
    reward_scale: float = 1.0
    reward_clip: float | None = None
    overlong: Overlong | None = None
    length_penalty: LengthPenalty | None = None
    reward_normalization: Normalization = Normalization()
    estimator: EstimatorSettings = EstimatorSettings()
    aggregation: Aggregation = Aggregation.TOKEN_MEAN
    aggregation_divisor: float | None = None
    temperature: float = 1.0
    stall: StallSettings = StallSettings()


def uses_group_statistics(settings: AssemblySettings) -> bool:
    """Whether some statistic is taken within groups: then a group of one says nothing."""
    levels = (settings.reward_normalization.mean, settings.reward_normalization.std)
    return settings.estimator.name in GROUP_ESTIMATORS or Level.GROUP in levels


def usable_minimum(settings: AssemblySettings, num_slots: int) -> int:
    """Usable slots that a group of `num_slots` needs: explicit, else 2 with group statistics, else 1."""
    if settings.min_usable_group_size is not None:
        return settings.min_usable_group_size
    return min(2, num_slots) if uses_group_statistics(settings) else 1


def check_settings(settings: AssemblySettings) -> AssemblySettings:
    """The settings themselves.

    Raises:
        ConfigError: something in them can't work; names the keys and what they hold.
    """
    _check_sizes(settings)
    _check_minimum(settings)
    _check_shares(settings)
    _check_bounds(settings)
    try:
        check_aggregation(settings.aggregation, settings.aggregation_divisor)
    except ValueError as error:
        raise ConfigError(f"assembly.{error}") from error
    return settings


def _check_sizes(settings: AssemblySettings) -> None:
    for name in ("groups_per_step", "slots_per_group"):
        value: int = getattr(settings, name)
        if value < 1:
            raise ConfigError(f"sampling.{name}: expected at least 1, found {value}")
    mini = settings.mini_batch_groups
    if mini is None:
        return
    if mini < 1:
        raise ConfigError(f"assembly.mini_batch_groups: expected at least 1, found {mini}")
    if settings.groups_per_step % mini and not settings.dynamic_batch:
        raise ConfigError(
            f"assembly.mini_batch_groups = {mini} does not divide sampling.groups_per_step = {settings.groups_per_step}: "
            "the last optimizer step of every step would be smaller; choose a divisor"
        )


def _check_minimum(settings: AssemblySettings) -> None:
    least, slots = settings.min_usable_group_size, settings.slots_per_group
    key = "assembly.min_usable_group_size"
    if least is None:
        return
    if least < 1:
        raise ConfigError(f"{key}: expected at least 1, found {least}")
    if least > slots:
        raise ConfigError(
            f"{key} = {least} is more than sampling.slots_per_group = {slots}: every group would be dropped"
        )
    if least < 2 <= slots and uses_group_statistics(settings):
        raise ConfigError(
            f"{key} = {least} with statistics within groups ({settings.estimator.name}): a group of one has no baseline; "
            "expected at least 2, or batch statistics"
        )


def _check_shares(settings: AssemblySettings) -> None:
    if settings.min_shares and settings.dynamic_batch:
        raise ConfigError(
            "assembly.min_shares and assembly.dynamic_batch exclude each other: a dynamic batch takes what a round gave"
        )
    for stream, share in settings.min_shares.items():
        if not 0.0 < share <= 1.0:
            raise ConfigError(f"assembly.min_shares.{stream}: expected a share in (0, 1], found {share}")
    needed = sum(least_groups(settings).values())
    if needed > settings.groups_per_step:
        raise ConfigError(
            f"assembly.min_shares ask for {needed} groups a step in all, sampling.groups_per_step is {settings.groups_per_step}"
        )


def _check_bounds(settings: AssemblySettings) -> None:
    low, high = settings.min_accuracy, settings.max_accuracy
    for name, value in (("min_accuracy", low), ("max_accuracy", high)):
        if value is not None and not 0.0 <= value <= 1.0:
            raise ConfigError(f"assembly.{name}: expected a share in [0, 1], found {value}")
    if low is not None and high is not None and low > high:
        raise ConfigError(f"assembly.min_accuracy = {low} is above max_accuracy = {high}: every group would be dropped")
    if settings.max_staleness is not None and settings.max_staleness < 0:
        raise ConfigError(f"sampling.max_staleness: expected at least 0, found {settings.max_staleness}")
    clip = settings.reward_clip
    if clip is not None and not (math.isfinite(clip) and clip > 0.0):
        raise ConfigError(f"assembly.reward_clip: expected a finite number > 0, found {clip}")
    overlong = settings.overlong
    if overlong is not None and not 0 < overlong.buffer_tokens <= overlong.max_tokens:
        raise ConfigError(
            f"assembly.overlong: expected 0 < buffer_tokens <= max_tokens, found {overlong.buffer_tokens} and {overlong.max_tokens}"
        )
    for key, ddof in (
        ("reward_normalization", settings.reward_normalization.ddof),
        ("estimator", settings.estimator.ddof),
    ):
        if ddof not in (0, 1):
            raise ConfigError(f"assembly.{key}.ddof: expected 0 (population) or 1 (sample), found {ddof}")
    for key, eps in (
        ("reward_normalization", settings.reward_normalization.eps),
        ("estimator", settings.estimator.eps),
    ):
        if not (math.isfinite(eps) and eps >= 0.0):
            raise ConfigError(f"assembly.{key}.eps: expected a finite number >= 0, found {eps}")
    if settings.reward_normalization.leave_one_out_std and settings.reward_normalization.std is not Level.GROUP:
        raise ConfigError(
            "assembly.reward_normalization.leave_one_out_std works within groups: "
            f"expected std = group, found {settings.reward_normalization.std}"
        )


def least_groups(settings: AssemblySettings) -> dict[str, int]:
    """Groups of each stream that a step holds at least, rounded to the nearest and never 0."""
    return {stream: max(1, round(share * settings.groups_per_step)) for stream, share in settings.min_shares.items()}
