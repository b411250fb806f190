"""What is to be rolled out: streams, groups, episodes asked for."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Final

import msgspec

from schemas.payload import PayloadRef

MAX_SLOTS: Final = 4096
"""Of one group: more is a damaged message, not a wish."""


class RunStarted(msgspec.Struct, frozen=True, kw_only=True):
    """A command took up the run. The first one fixes what folds may depend on; a later one must agree with it."""

    ordinal: int
    """0 for the run's first start, then 1, 2 …"""
    config_json: bytes
    """The run's config as JSON, secrets left out (they are named by environment variable)."""
    config_digest: str
    """Of the settings that folds depend on: all starts of a run must agree in it."""
    headrace_version: str
    steps: int | None = None
    """Trained steps after which the run ends; a later start may move it."""
    epochs: int | None = None
    """Passes over the mixture after which it ends; a later start may move it."""
    policy_digest: str = ""
    """Of the weight files that version 0 is; empty where there are none (stand-ins)."""
    issue_below: int | None = None
    """Groups with an ordinal below this may be issued until it is known what a group takes of the store; None: no bound."""


class RunFinished(msgspec.Struct, frozen=True, kw_only=True):
    """Nothing more can be trained in this start of the run: its last step is trained, or its epochs or streams are used up."""

    ordinal: int
    """Of the RunStarted that set this end."""
    steps: int
    """Trained steps."""
    reason: str
    """`steps`, `epochs`, or `streams` (all are open ones that were closed, and every row is drawn)."""


class StreamRow(msgspec.Struct, frozen=True, array_like=True):
    """One prompt or task of a stream."""

    data_id: str
    tags: list[str] = []
    payload: PayloadRef | None = None
    """The prompt itself for published prompts; None for an Arena's tasks (the Arena holds them)."""


class StreamListed(msgspec.Struct, frozen=True, kw_only=True):
    """All rows of one stream, listed once for the run."""

    stream: str
    rows: PayloadRef
    """msgpack `list[StreamRow]`, in the source's order."""
    num_rows: int
    weight: float
    """Sampling weight, > 0, any scale."""


class PromptPublished(msgspec.Struct, frozen=True, kw_only=True):
    """A row that somebody published into a stream that stays open."""

    stream: str
    data_id: str
    prompt: PayloadRef
    """JSON: a string, a list of chat messages, or the object that the stream's runner expects."""
    tags: list[str] = []


class GroupIssued(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt is to be rolled out `num_slots` times."""

    group: str
    ordinal: int
    """Number of this group in the run, from 0."""
    stream: str
    data_id: str
    tags: list[str] = []
    prompt: PayloadRef | None = None
    epoch: int = 0
    """How many times the stream was gone through before."""
    num_slots: Annotated[int, msgspec.Meta(ge=1, le=MAX_SLOTS)]
    min_version: int = 0
    """Lowest weight version its tokens may be sampled with."""
    evaluation: bool = False
    """Never trained on."""
    deadline_tick: int | None = None
    """The tick (see Tick) at which the group is closed with the members it has."""


class EpisodeRequested(msgspec.Struct, frozen=True, kw_only=True):
    """One slot of a group is to be rolled out: attempt 0 by fan-out, further ones after a system failure."""

    group: str
    slot: int
    attempt: int
    stream: str
    data_id: str
    tags: list[str] = []
    prompt: PayloadRef | None = None
    min_version: int = 0
    evaluation: bool = False


class GroupClosed(msgspec.Struct, frozen=True, kw_only=True):
    """Every slot of a group has ended, or its deadline has come."""

    group: str
    stream: str
    usable: bool
    """Whether the group waits to be trained; False gives its credit back."""
    reason: str = ""
    """Why it is not usable: see assembly's reasons."""
    num_slots: int = 0
    num_usable: int = 0
    num_rejected: int = 0
    num_missing: int = 0
    evaluation: bool = False


class ControlAction(StrEnum):
    """What a person may ask of a run."""

    DRAIN = "drain"
    PAUSE = "pause"
    RESUME = "resume"
    STOP = "stop"


class Control(msgspec.Struct, frozen=True, kw_only=True):
    """An instruction to the whole run, in the order of the log."""

    id: str
    """Unique per instruction, made by the one who gives it."""
    action: ControlAction
    reason: str = ""


class Tick(msgspec.Struct, frozen=True, kw_only=True):
    """Time, as a message: the only way in which time enters a fold."""

    ordinal: int
    """Ticks are created once each; `ordinal` · `period_s` is the run's logical time in seconds."""
    period_s: float
    unix_time_s: float


class Retain(msgspec.Struct, frozen=True, kw_only=True):
    """The low-water mark: no reader needs anything below it any more. And whether there is room for more."""

    ordinal: int
    sequence: int
    held_by: str
    """Who holds the mark where it is."""
    full: bool = False
    """The run's store is nearly full: nothing new is begun until a later mark says otherwise."""
    reason: str = ""
    """What is full, and how full."""
    issue_below: int | None = None
    """Groups with an ordinal below this may be issued: for them there is room in the store, whatever is purged meanwhile; None:
    what was said before counts.
    """


class LogHold(msgspec.Struct, frozen=True, kw_only=True):
    """Last-value: somebody reads the log, and asks that nothing from `sequence` on be purged."""

    what: str
    """For people: `recorder of run.hrrec on host-3`."""
    sequence: int
    ttl_s: float
    """It counts for so long after it was renewed last, by the clock of whoever purges."""
    released: bool = False
    """It counts no more."""


class DeadLetter(msgspec.Struct, frozen=True, kw_only=True):
    """A message that a stage gave up."""

    stage: str
    sequence: int
    """Sequence of the message in the run's log."""
    subject: str
    reason: str
    """`undecodable`, `attempts`, or `refused`."""
    error: str
    attempts: int
    data: bytes
    """The message's own bytes."""


class DeadRetry(msgspec.Struct, frozen=True, kw_only=True):
    """A dead letter is to be handled by its stage again, as a new attempt with a place of its own in the log.

    No other reader of the message's topic sees it. If it fails again, a new dead letter names this one's sequence.
    """

    stage: str
    sequence: int
    """The dead letter's `sequence`."""
    attempt: int
    """1 for the first retry that a person asked for, then 2 …"""
    subject: str
    """The subject of the message that was given up."""
    data: bytes
    """What to handle: the message's own bytes, or mended ones."""


class DeadDropped(msgspec.Struct, frozen=True, kw_only=True):
    """A person decided that a dead letter needs nothing more."""

    stage: str
    sequence: int
    """The dead letter's `sequence`."""
    reason: str = ""
