"""Who is in: a trajectory into its group, stale slots out of it, waiting groups into the next step. Pure rules."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from pipeline.errors import ContractError, RefusedError
from schemas.messages.rollout import Row, Trajectory
from stages.assembly.filters import usable
from stages.assembly.settings import AssemblySettings, RowsPerSlot, StaleRule, least_groups
from stages.assembly.state import AssemblyState, Group, Member


class Chosen(msgspec.Struct, frozen=True, kw_only=True):
    """The groups of the next step."""

    groups: list[Group]
    missing_shares: int = 0
    """Groups by which streams fall short of their least share."""


def admit(trajectory: Trajectory, group: Group, settings: AssemblySettings) -> Member:
    """What a slot gave, as a member of its group.

    Raises:
        RefusedError: a slot outside the group.
        ContractError: more rows than `rows_per_slot` allows, rows of one slot with different
            rewards that no turn rewards explain, or a row of another temperature.
    """
    slot = trajectory.slot
    if not 0 <= slot < group.num_slots:
        raise RefusedError(
            f"group {group.group} has slots 0 to {group.num_slots - 1}: found a trajectory for slot {slot}"
        )
    reason = _rejection(trajectory)
    if reason:
        return Member(slot=slot, rejected=reason)
    if group.evaluation:  # never trained: its rows need not be kept, nor be fit for training
        return Member(slot=slot, reward=trajectory.reward or 0.0, solved=trajectory.solved)
    _check_rows(trajectory, settings)
    return Member(
        slot=slot,
        reward=trajectory.reward or 0.0,
        solved=trajectory.solved,
        rows=trajectory.rows,
        num_turns=trajectory.num_interactions,
        num_output_tokens=trajectory.num_completion_tokens,
    )


def freshen(group: Group, step: int, settings: AssemblySettings) -> Group:
    """The group without what is too old for this step; the very same object when nothing is.

    A row's staleness is (step - 1) - its oldest version: queue time included.
    """
    if settings.max_staleness is None:
        return group
    oldest = step - 1 - settings.max_staleness
    stale = [
        member.slot
        for member in group.members.values()
        if any(row.num_loss_tokens and row.min_version < oldest for row in member.rows)
    ]
    if not stale:
        return group
    if settings.stale is StaleRule.GROUP:
        stale = list(group.members)
    members = {
        slot: Member(slot=slot, rejected="stale") if slot in stale else member for slot, member in group.members.items()
    }
    return msgspec.structs.replace(group, members=members)


def choose(state: AssemblyState, settings: AssemblySettings) -> Chosen | None:
    """The groups of the next step in the order of closing, or None while it has to wait."""
    waiting = list(state.waiting.values())
    if settings.dynamic_batch:
        enough = bool(waiting) and state.ended_in_round >= settings.groups_per_step
        return Chosen(groups=waiting[: settings.groups_per_step]) if enough else None
    if len(waiting) < settings.groups_per_step:
        return None
    return _with_shares(state, waiting, settings)


def refuse_lone_members(groups: Sequence[Group], settings: AssemblySettings) -> None:
    """Stop where every group of a step has one usable slot of several: siblings are not found as such, or nearly
    everything fails.

    Raises:
        ContractError: so it is, and no explicit min_usable_group_size = 1 accepts it.
    """
    if settings.min_usable_group_size == 1 or any(group.num_slots == 1 or len(usable(group)) > 1 for group in groups):
        return
    raise ContractError(
        f"all {len(groups)} groups of a step have one usable slot of {groups[0].num_slots}: is each rollout published as a group of its own, or do "
        "nearly all slots fail? assembly.min_usable_group_size = 1 accepts such steps"
    )


def _with_shares(state: AssemblyState, waiting: list[Group], settings: AssemblySettings) -> Chosen | None:
    """First each stream's least share, then whoever closed first. A stream that falls short is waited for while it
    has open groups, and no longer than a round of closed groups: it must not hold up the others for ever.
    """
    picked: dict[str, Group] = {}
    missing = 0
    waited_for = False
    for stream, least in least_groups(settings).items():
        found = [group for group in waiting if group.stream == stream][:least]
        picked.update((group.group, group) for group in found)
        missing += least - len(found)
        waited_for |= len(found) < least and any(g.stream == stream and not g.evaluation for g in state.open.values())
    if waited_for and state.closed_while_short < settings.groups_per_step:
        return None
    for group in waiting:
        if len(picked) >= settings.groups_per_step:
            break
        picked.setdefault(group.group, group)
    order = [group for group in waiting if group.group in picked]
    return Chosen(groups=order, missing_shares=missing)


def _rejection(trajectory: Trajectory) -> str:
    if trajectory.rejected:
        return trajectory.reason or "rejected"
    if trajectory.reward is None:
        return "no_reward"
    return "" if trajectory.rows else "no_rows"


def _check_rows(trajectory: Trajectory, settings: AssemblySettings) -> None:
    rows = trajectory.rows
    where = f"group {trajectory.group}, slot {trajectory.slot}"
    if settings.rows_per_slot is RowsPerSlot.ONE and len(rows) > 1:
        raise ContractError(
            f"{where} gave {len(rows)} rows, assembly.rows_per_slot = one allows a single one. Remedies: allow any number "
            "(assembly.rows_per_slot = any); let the agent keep one growing conversation (no context compaction, no "
            "sub-agents); or export whole chains (reward.export = concat)"
        )
    other = next((row for row in rows if row.num_loss_tokens and row.temperature != settings.temperature), None)
    if other is not None:
        raise ContractError(
            f"{where}: row {other.row} was sampled at temperature {other.temperature:g}, the step is scored at rollout.temperature = "
            f"{settings.temperature:g}; log-probs of two temperatures can't be compared. Keep calls with settings of their own out of training"
        )
    mapped = trajectory.rewards_per_completion or any(row.turn_rewards for row in rows)
    if _differ(rows) and not mapped:
        rewards = ", ".join(f"{row.reward:g}" for row in rows[:4])
        raise ContractError(
            f"{where}: its rows have different rewards ({rewards} …) and no turn rewards that explain them; give one reward a slot, or "
            "rewards per completion id"
        )


def _differ(rows: list[Row]) -> bool:
    return any(row.reward != rows[0].reward for row in rows)
