"""What assembly remembers: open groups, usable groups that wait, and counts. Nothing of a group that has ended.

The state is a checkpoint: plain structs and dicts in the order of the log, so that equal logs give equal bytes.
"""

from __future__ import annotations

import msgspec

from schemas.messages.rollout import Row
from schemas.messages.training import DroppedGroup
from stages.assembly.stall import StallState


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """What one slot gave, as far as assembly needs it."""

    slot: int
    rejected: str = ""
    """Why it is not usable; empty when it is."""
    reward: float = 0.0
    solved: bool = False
    rows: list[Row] = []
    num_turns: int = 0
    num_output_tokens: int = 0


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """A group and the members it has."""

    group: str
    ordinal: int
    stream: str
    num_slots: int
    evaluation: bool = False
    opened_tick: int = 0
    """The latest tick before its issue."""
    deadline_tick: int | None = None
    members: dict[int, Member] = {}
    """slot → what it gave, in the order of arrival."""


class Tally(msgspec.Struct, kw_only=True):
    """Counts of one stream's closed groups since the step before, filters not yet applied."""

    closed: int = 0
    target_slots: int = 0
    usable_slots: int = 0
    trainable_slots: int = 0
    fully_masked_groups: int = 0
    singleton_groups: int = 0
    dropped: dict[str, int] = {}
    """reason → groups."""
    rejected: dict[str, int] = {}
    """reason → slots of closed groups that ended as rejected."""


class AssemblyState(msgspec.Struct, kw_only=True):
    """Everything that assembly knows; checkpointed."""

    open: dict[str, Group] = {}
    """Issued and not closed."""
    waiting: dict[str, Group] = {}
    """Closed and usable, in no step yet, in the order of closing. None is too old for the next step."""
    ended_in_round: int = 0
    """Groups closed since the step before, usable or not: what a dynamic batch counts."""
    next_step: int = 1
    in_training: dict[int, int] = {}
    """Assembled and not known to be trained: step → its number of groups."""
    num_trained: int = 0
    """Highest trained step."""
    trainer: int = 0
    """Newest generation of the trainer that was heard."""
    issued_below: int = 0
    """Every ordinal below was issued."""
    issued_above: list[int] = []
    """Issued ordinals above it, sorted: holes are rare."""
    dropped: list[DroppedGroup] = []
    """Dropped since the step before, for its manifest."""
    tallies: dict[str, Tally] = {}
    """stream → counts since the step before."""
    num_groups_trained: int = 0
    num_groups_dropped: int = 0
    num_groups_evaluated: int = 0
    num_late: int = 0
    """Members that came after their group had closed (or of no known group)."""
    num_duplicate: int = 0
    tick: int = 0
    closed_while_short: int = 0
    """Groups closed since the next step was only held up by a stream's least share."""
    stall: StallState = msgspec.field(default_factory=StallState)
    last_step: dict[str, float] = {}
    """Stats of the latest step; those of a stream after its name and a dot."""


def is_new(state: AssemblyState, ordinal: int) -> bool:
    """Whether this ordinal was not issued before; remembers it, in a number and the few holes above it."""
    if ordinal < state.issued_below or ordinal in state.issued_above:
        return False
    state.issued_above = sorted([*state.issued_above, ordinal])
    while state.issued_above and state.issued_above[0] == state.issued_below:
        state.issued_below += 1
        del state.issued_above[0]
    return True
