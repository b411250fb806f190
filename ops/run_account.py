"""What an account of a run says, and what it keeps between messages. The counting is in `accounts`."""

from __future__ import annotations

import msgspec

from ops.evaluations import Evaluation, EvaluationsState
from ops.solved import Solved, SolvedState


class GroupCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Issued = trained + dropped + open + unexplained."""

    issued: int
    trained: int
    dropped: int
    open: int


class EpisodeCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Attempts at slots."""

    requested: int
    ended: int
    rejected: int
    """Slots that ended as rejected."""


class HarnessClasses(msgspec.Struct, frozen=True, kw_only=True):
    """How the episodes of one stream ended that one harness ran."""

    stream: str
    harness: str
    """"key@version", or an agent's import path; empty where nothing was launched, or where it is not known."""
    classes: dict[str, int]
    """Episode ends by class."""


class Staleness(msgspec.Struct, frozen=True, kw_only=True):
    """In versions, over all trained rows."""

    max: int
    bound: int | None
    """None: rows of another run, without a bound."""


class RunAccount(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a run, as `headrace run --json` prints it."""

    run: str
    steps: int
    """Trained steps."""
    reward_by_step: list[float]
    groups: GroupCounts
    episodes: EpisodeCounts
    dead_letters: int
    staleness: Staleness
    trained_rows: int
    unexplained: int
    unexplained_groups: list[str] = []
    doubled: int = 0
    """Groups that ended in more than one way or were assembled twice."""
    dropped_by_reason: dict[str, int] = {}
    classes: dict[str, int] = {}
    """Episode ends by class."""
    classes_by_harness: list[HarnessClasses] = []
    """The same by stream and harness."""
    groups_by_stream: dict[str, int] = {}
    """Issued groups."""
    extra_launches: int = 0
    """Launches that were repeated with a new session, since the answer to one in flight was lost."""
    registrations_left: int | None = None
    """The run's registrations that still stand in the Arena at its end; None where nobody looked."""
    evaluations: list[Evaluation] = []
    """By stream and version; their groups are among the dropped ones, with the reason `evaluation`."""
    solved: list[Solved] = []
    """Of the groups that train, by stream and task type."""
    seconds: float = 0.0


class GroupAccount(msgspec.Struct, kw_only=True):
    """A group whose end is not final yet."""

    ordinal: int
    num_slots: int
    slots: set[int] = set()
    closed: bool = False
    reason: str = ""
    """Why it is not trained."""
    evaluation: bool = False
    steps: list[int] = []
    last_sequence: int = 0
    """Where its latest trajectory stands."""


class StepAccount(msgspec.Struct, frozen=True, kw_only=True):
    """An assembled step that is not known to be trained."""

    groups: list[str]
    mean_reward: float
    min_version: int
    num_rows: int


class AccountState(msgspec.Struct, kw_only=True):
    """Everything that an account knows. What can't change any more is only counted."""

    groups: dict[str, GroupAccount] = {}
    settled_below: int = 0
    """Every group with a lower ordinal is settled."""
    settled_above: set[int] = set()
    settled_names: set[str] = set()
    """Settled groups whose ids don't tell their ordinal."""
    strangers: set[str] = set()
    """Groups that are spoken of and were never issued."""
    assembled: dict[int, StepAccount] = {}
    trained: set[int] = set()
    """Trained, and not known to be assembled."""
    rewards: dict[int, float] = {}
    """Trained step → its mean reward."""
    generation: int = 0
    """Newest generation of the trainer that was heard."""
    trained_rows: int = 0
    staleness: int = 0
    num_trained: int = 0
    num_dropped: int = 0
    reasons: dict[str, int] = {}
    num_issued: int = 0
    doubled: int = 0
    requested: int = 0
    ended: int = 0
    rejected: int = 0
    dead: int = 0
    extra_launches: int = 0
    classes: dict[str, int] = {}
    classes_by_harness: dict[tuple[str, str], dict[str, int]] = {}
    """(stream, harness) → class → ends."""
    streams: dict[str, int] = {}
    evaluations: EvaluationsState = msgspec.field(default_factory=EvaluationsState)
    solved: SolvedState = msgspec.field(default_factory=SolvedState)
