"""Which groups are trained: rules on a closed group, each of which says why it drops one.

A rule is pure: the same group gives the same answer on every replay. Knows no step and no other group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Final

import msgspec

from pipeline.errors import ContractError
from pipeline.functions import load_function
from schemas.messages.rollout import LOCAL_UNCLAIMED, Row
from stages.assembly import moments
from stages.assembly.settings import AssemblySettings, usable_minimum
from stages.assembly.state import Group, Member


class Reason(StrEnum):
    """Why a group is not trained. A user's filter adds `filter:<its own word>`."""

    EVALUATION = "evaluation"
    INCOMPLETE = "incomplete"
    TOO_FEW_USABLE = "too_few_usable"
    UNCLAIMED = "unclaimed"
    """No session of a user's own service claimed one of its slots in time."""
    MASKED = "masked"
    STALE = "stale"
    ZERO_SPREAD = "zero_spread"
    ACCURACY = "accuracy"


class SlotView(msgspec.Struct, frozen=True, kw_only=True):
    """What a user's filter sees of a usable slot."""

    slot: int
    reward: float
    solved: bool
    num_rows: int
    num_tokens: int
    num_loss_tokens: int


class GroupView(msgspec.Struct, frozen=True, kw_only=True):
    """What a user's filter sees of a closed group."""

    group: str
    stream: str
    num_slots: int
    slots: list[SlotView]


UserFilter = Callable[[GroupView], str | None]
"""A word that says why the group is dropped, or None to keep it. Must be pure."""

NO_FILTERS: Final[tuple[UserFilter, ...]] = ()


def load_filters(paths: Sequence[str]) -> tuple[UserFilter, ...]:
    """The functions behind import paths `package.module:function`.

    Raises:
        ConfigError: one that can't be imported or called.
    """
    return tuple(_load_filter(path) for path in paths)


def _load_filter(path: str) -> UserFilter:
    found = load_function("assembly.user_filters", path, "a function of a GroupView")

    def user_filter(view: GroupView) -> str | None:
        reason = found(view)
        if reason is not None and not isinstance(reason, str):
            raise ContractError(f"user filter {path} returned {reason!r}: expected a word or None")
        return reason

    return user_filter


def usable(group: Group) -> list[Member]:
    """The members that were not rejected, in the order of slots."""
    return [group.members[slot] for slot in sorted(group.members) if not group.members[slot].rejected]


def trains(row: Row, settings: AssemblySettings) -> bool:
    """Whether a row has tokens to train."""
    return row.num_loss_tokens > 0 and not (settings.mask_truncated and row.truncated)


def trainable(group: Group, settings: AssemblySettings) -> list[Member]:
    """The usable members with at least one row to train: those that vote."""
    return [member for member in usable(group) if any(trains(row, settings) for row in member.rows)]


def drop_reason(group: Group, settings: AssemblySettings, user_filters: Sequence[UserFilter] = NO_FILTERS) -> str:
    """Why this closed group is not trained, or an empty string. The first rule that applies names it."""
    members = usable(group)
    if group.evaluation:
        return Reason.EVALUATION
    if group.members and all(member.rejected.startswith(LOCAL_UNCLAIMED) for member in group.members.values()):
        return Reason.UNCLAIMED
    if settings.drop_incomplete_groups and len(members) < group.num_slots:
        return Reason.INCOMPLETE
    if len(members) < usable_minimum(settings, group.num_slots):
        return Reason.TOO_FEW_USABLE
    voters = trainable(group, settings)
    if not voters:
        return Reason.MASKED
    if settings.filter_zero_spread and not moments.has_spread([member.reward for member in voters]):
        return Reason.ZERO_SPREAD
    accuracy = sum(member.solved for member in voters) / len(voters)
    if settings.min_accuracy is not None and accuracy < settings.min_accuracy:
        return Reason.ACCURACY
    if settings.max_accuracy is not None and accuracy > settings.max_accuracy:
        return Reason.ACCURACY
    return _user_reason(group, voters, user_filters)


def silent_streams(closed: Mapping[str, int], dropped: Mapping[str, int], streams: Iterable[str]) -> list[str]:
    """Streams that closed groups and lost every one of them: to be named in a warning."""
    return [name for name in streams if closed.get(name, 0) and dropped.get(name, 0) >= closed.get(name, 0)]


def _user_reason(group: Group, voters: Sequence[Member], user_filters: Sequence[UserFilter]) -> str:
    if not user_filters:
        return ""
    view = GroupView(
        group=group.group,
        stream=group.stream,
        num_slots=group.num_slots,
        slots=[
            SlotView(
                slot=member.slot,
                reward=member.reward,
                solved=member.solved,
                num_rows=len(member.rows),
                num_tokens=sum(row.num_tokens for row in member.rows),
                num_loss_tokens=sum(row.num_loss_tokens for row in member.rows),
            )
            for member in voters
        ],
    )
    for user_filter in user_filters:
        found = user_filter(view)
        if found:
            return f"filter:{found}"
    return ""
