"""Chapter 7: how a step is made.

Assembly waits until every slot of a group has ended, closes it, and makes a step of enough usable groups. One manifest then
decides everything about the batch: which rows, their rewards, their advantages, and one loss weight a row. The trainer
only carries it out, and gets the same loss however it packs rows or spreads them over ranks.
"""

from __future__ import annotations

import msgspec
import numpy as np

from pipeline.fold import Output, replay
from schemas.ids import group_id, row_id
from schemas.messages.rollout import EpisodeClass, Row, Trajectory
from schemas.messages.sampling import GroupClosed, GroupIssued
from schemas.messages.training import Manifest, StepAssembled
from schemas.payload import PayloadRef
from stages.assembly.fold import AssemblyFold
from stages.assembly.settings import AssemblySettings

SETTINGS = AssemblySettings(run="demo", groups_per_step=2, slots_per_group=2)


def issued(ordinal: int) -> GroupIssued:
    """A group of two slots."""
    return GroupIssued(group=group_id(ordinal), ordinal=ordinal, stream="words", data_id=f"d{ordinal}", num_slots=2)


def trajectory(ordinal: int, slot: int, reward: float | None, num_tokens: int = 10) -> Trajectory:
    """What a slot gave: one row, or nothing (None)."""
    row = Row(
        row=row_id(group_id(ordinal), slot, 0),
        tokens=PayloadRef(store="run", id=f"{ordinal:016x}{slot:016x}", size_bytes=100),
        num_tokens=num_tokens + 5,
        num_loss_tokens=num_tokens,
        min_version=0,
        max_version=0,
        reward=reward or 0.0,
    )
    return Trajectory(
        group=group_id(ordinal),
        slot=slot,
        attempt=0,
        session=f"s{ordinal}-{slot}",
        stream="words",
        data_id=f"d{ordinal}",
        outcome=EpisodeClass.SYSTEM if reward is None else EpisodeClass.SCORED,
        rejected=reward is None,
        reason="the sandbox broke" if reward is None else "",
        rows=[] if reward is None else [row],
        reward=reward,
    )


def manifest_of(outputs: list[Output]) -> Manifest:
    """The one step among the outputs."""
    (step,) = [output for output in outputs if isinstance(output.message, StepAssembled)]
    return msgspec.msgpack.decode(step.payloads[0], type=Manifest)


def two_groups() -> list[msgspec.Struct]:
    """One group that differs in its rewards, and one whose second answer is long."""
    return [
        issued(0),
        issued(1),
        trajectory(0, 0, 1.0),
        trajectory(0, 1, 0.0),
        trajectory(1, 0, 0.0),
        trajectory(1, 1, 1.0, num_tokens=30),
    ]


def test_a_group_is_closed_when_its_last_slot_ends_and_enough_groups_make_a_step() -> None:
    """Not before: an advantage is a comparison within its group."""
    assert replay(AssemblyFold(SETTINGS), two_groups()[:3]) == []
    said = [type(output.message) for output in replay(AssemblyFold(SETTINGS), two_groups())]
    assert said == [GroupClosed, GroupClosed, StepAssembled]


def test_an_advantage_says_how_much_better_than_its_group_a_row_was() -> None:
    """GRPO: the reward minus the group's mean, over the group's spread."""
    advantages = manifest_of(replay(AssemblyFold(SETTINGS), two_groups())).advantage.as_numpy()
    assert advantages[0] > 0 > advantages[1]
    np.testing.assert_allclose(advantages[0], -advantages[1])


def test_one_loss_weight_a_row_stands_for_the_aggregation() -> None:
    """`token_mean`: every token counts the same, whoever's micro-batch it is in, so all weights times tokens add up to one."""
    manifest = manifest_of(replay(AssemblyFold(SETTINGS), two_groups()))
    weights, tokens = manifest.loss_weight.as_numpy(), manifest.num_loss_tokens.as_numpy()
    np.testing.assert_allclose(weights, 1 / 60)
    np.testing.assert_allclose((weights * tokens).sum(), 1.0)


def test_a_slot_that_broke_is_left_out_and_the_statistics_are_those_of_the_members_that_exist() -> None:
    """A sandbox's failure is not the policy's: it enters no mean."""
    messages = two_groups()
    messages[5] = trajectory(1, 1, None)
    outputs = replay(AssemblyFold(SETTINGS), [*messages, issued(2), trajectory(2, 0, 0.5), trajectory(2, 1, 0.25)])
    closed = {o.message.group: o.message for o in outputs if isinstance(o.message, GroupClosed)}
    assert (closed[group_id(1)].num_usable, closed[group_id(1)].num_rejected) == (1, 1)
    assert not closed[group_id(1)].usable  # a group of one has nothing to be compared with
    manifest = manifest_of(outputs)
    assert manifest.groups == [group_id(0), group_id(2)]
    assert [dropped.group for dropped in manifest.dropped] == [group_id(1)]


def test_the_same_log_gives_the_same_step_byte_for_byte() -> None:
    """A year later, on another machine."""
    first = replay(AssemblyFold(SETTINGS), two_groups())
    assert replay(AssemblyFold(SETTINGS), two_groups()) == first
