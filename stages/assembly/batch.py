"""The numbers of a step: rewards, advantages and loss weights of its rows, from the groups alone.

Groups stand in the order of issue, slots and rows by number: the same membership gives the same bytes whatever the
order of arrival was. A slot votes with its own reward; its line then maps the reward of each of its rows and turns.
Float64; knows no token, no payload, no step number.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from schemas.messages.rollout import Row
from stages.assembly.advantages import advantage_lines
from stages.assembly.filters import trainable, trains, usable
from stages.assembly.normalization import Line, normalization_lines
from stages.assembly.rewards import Cost, length_penalties, overlong_penalty, shape
from stages.assembly.settings import AssemblySettings
from stages.assembly.state import Group, Member
from stages.assembly.weights import step_weights

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


class BatchRow(msgspec.Struct, frozen=True, kw_only=True):
    """One row and where it belongs."""

    row: Row
    group: int
    """Index among the step's groups."""
    slot: int
    mini_batch: int
    advantage: float
    turn_advantages: list[float] = []
    num_loss_tokens: int
    """0 where the row is masked as a whole."""


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """A step's rows with their numbers."""

    groups: list[Group]
    rows: list[BatchRow]
    loss_weight: Floats
    """[R]"""
    num_mini_batches: int

    def column(self, name: str) -> Ints:
        """[R] an integer field of the rows themselves (`num_tokens`, `min_version` …)."""
        return np.array([getattr(entry.row, name) for entry in self.rows], dtype=np.int64)


def build_batch(groups: Sequence[Group], settings: AssemblySettings) -> Batch:
    """All numbers of a step made of these groups, each of which has at least one row to train."""
    ordered = sorted(groups, key=lambda group: group.ordinal)
    each = settings.mini_batch_groups or len(ordered)
    voters = [trainable(group, settings) for group in ordered]
    maps = [
        {member.slot: slot_map for member, slot_map in zip(*pair, strict=True)}
        for pair in zip(voters, _slot_maps(voters, settings), strict=True)
    ]
    rows = [
        _batch_row(row, index, member.slot, index // each, maps[index].get(member.slot), settings)
        for index, group in enumerate(ordered)
        for member in usable(group)
        for row in member.rows
    ]
    weights = step_weights(
        [entry.num_loss_tokens for entry in rows],
        [entry.group for entry in rows],
        [entry.mini_batch for entry in rows],
        settings.aggregation,
        settings.aggregation_divisor,
    )
    return Batch(groups=ordered, rows=rows, loss_weight=weights, num_mini_batches=-(-len(ordered) // each))


class _SlotMap(NamedTuple):
    """From a reward of a slot, its rows or its turns to an advantage."""

    penalty: float
    normalization: Line
    estimator: Line

    def at(self, reward: float, settings: AssemblySettings) -> float:
        return self.estimator.at(self.normalization.at(_value(reward, self.penalty, settings)))


def _batch_row(
    row: Row, group: int, slot: int, mini_batch: int, slot_map: _SlotMap | None, settings: AssemblySettings
) -> BatchRow:
    if slot_map is None or not trains(row, settings):
        return BatchRow(row=row, group=group, slot=slot, mini_batch=mini_batch, advantage=0.0, num_loss_tokens=0)
    return BatchRow(
        row=row,
        group=group,
        slot=slot,
        mini_batch=mini_batch,
        advantage=slot_map.at(row.reward, settings),
        # Turn rewards are returns already (each holds the discounted ones after it), so the penalty is in every one.
        turn_advantages=[slot_map.at(reward, settings) for reward in row.turn_rewards],
        num_loss_tokens=row.num_loss_tokens,
    )


def _value(reward: float, penalty: float, settings: AssemblySettings) -> float:
    return shape(reward + penalty, bias=settings.reward_bias, scale=settings.reward_scale, clip=settings.reward_clip)


def _penalties(members: Sequence[Member], settings: AssemblySettings) -> list[float]:
    """What each slot's reward loses for its length: a slot of several rows counts its longest answer."""
    added = [0.0] * len(members)
    if settings.overlong is not None:
        for index, member in enumerate(members):
            longest = max(row.num_loss_tokens for row in member.rows)
            added[index] += overlong_penalty(longest, settings.overlong)
    if settings.length_penalty is not None:
        rewards = [member.reward + penalty for member, penalty in zip(members, added, strict=True)]
        found = length_penalties(rewards, [_cost(member) for member in members], settings.length_penalty)
        added = [one + other for one, other in zip(added, found, strict=True)]
    return added


def _cost(member: Member) -> Cost:
    output = member.num_output_tokens or sum(row.num_loss_tokens for row in member.rows)
    total = sum(row.num_tokens for row in member.rows)
    return Cost(num_output_tokens=output, num_input_tokens=max(0, total - output), num_turns=max(1, member.num_turns))


def _slot_maps(voters: Sequence[Sequence[Member]], settings: AssemblySettings) -> list[list[_SlotMap]]:
    """Reward normalisation and estimator of each voting slot: statistics over the step's slots, one vote each."""
    penalties = [_penalties(members, settings) for members in voters]
    values = [
        [_value(member.reward, penalty, settings) for member, penalty in zip(*pair, strict=True)]
        for pair in zip(voters, penalties, strict=True)
    ]
    tokens = [
        [sum(row.num_loss_tokens for row in member.rows if trains(row, settings)) for member in members]
        for members in voters
    ]
    first = normalization_lines(values, settings.reward_normalization)
    normalised = [
        [line.at(value) for line, value in zip(*pair, strict=True)] for pair in zip(first, values, strict=True)
    ]
    second = advantage_lines(normalised, tokens, settings.estimator)
    return [
        [_SlotMap(*parts) for parts in zip(*group, strict=True)] for group in zip(penalties, first, second, strict=True)
    ]
