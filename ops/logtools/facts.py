"""Everything the log says about one group, and about the steps: what `why` and `inspect` tell from.

The first message of a key stands; what can't be decoded is kept as a remark, never guessed at.
"""

from __future__ import annotations

from typing import Final, Generic, TypeVar

import msgspec

from broker.api import Record
from ops.logtools.sources import LogSource, Told, tell
from pipeline.generations import Generations
from schemas.errors import InvalidIdError
from schemas.messages import rollout as r
from schemas.messages import sampling as s
from schemas.messages import training as t
from schemas.subjects import PREFIX, split_subject

M = TypeVar("M", bound=msgspec.Struct)


class At(msgspec.Struct, Generic[M], frozen=True, kw_only=True):
    """A message with its place and time."""

    message: M
    sequence: int
    time_s: float


def _at(message: M, record: Record) -> At[M]:
    return At(message=message, sequence=record.sequence, time_s=record.unix_time_s)


class GroupFacts:
    """What the log says about one group and its slots, in the order of the log."""

    def __init__(self, group: str) -> None:
        self.group: Final = group
        self.issued: At[s.GroupIssued] | None = None
        self.closed: At[s.GroupClosed] | None = None
        self.requested: Final[dict[tuple[int, int], At[s.EpisodeRequested]]] = {}
        self.launched: Final[dict[tuple[int, int, int], At[r.EpisodeLaunched]]] = {}
        self.accepted: Final[dict[tuple[int, int, int], At[r.EpisodeAccepted]]] = {}
        self.ended: Final[dict[tuple[int, int], At[r.EpisodeEnded]]] = {}
        self.ready: Final[dict[int, At[r.Trajectory]]] = {}
        self.opened: Final[dict[str, list[At[r.SessionOpened]]]] = {}
        self.calls: Final[dict[str, dict[int, At[r.InteractionRecorded]]]] = {}
        self.session_closed: Final[dict[str, At[r.SessionClosed]]] = {}
        self.rewarded: Final[dict[str, dict[int, At[r.SessionRewarded]]]] = {}
        self.letters: Final[list[At[s.DeadLetter]]] = []
        self.retries: Final[list[At[s.DeadRetry]]] = []
        self.drops: Final[list[At[s.DeadDropped]]] = []
        self.unreadable: Final[list[Told]] = []
        self.last_time_s = 0.0
        """The latest message of the log that was looked at."""

    @property
    def sessions(self) -> list[str]:
        """Sessions that its launches name, in order."""
        return list(dict.fromkeys(launch.message.session for launch in self.launched.values()))

    def slots(self) -> list[int]:
        """Every slot that is spoken of, and every one that was issued."""
        named = {slot for slot, _ in self.requested} | {slot for slot, _ in self.ended} | set(self.ready)
        issued = range(self.issued.message.num_slots) if self.issued is not None else ()
        return sorted(named | set(issued))

    def is_late(self, slot: int) -> bool:
        """Whether a slot's trajectory came after its group was closed."""
        ready = self.ready.get(slot)
        return ready is not None and self.closed is not None and ready.sequence > self.closed.sequence

    def letters_of(self, slot: int | None) -> list[At[s.DeadLetter]]:
        """Dead letters that concern a slot; with None those that concern the group alone."""
        return [letter for letter in self.letters if _slot_of(letter.message.subject) == slot]

    def take(self, told: Told) -> None:
        """One message; the first of a key stands."""
        record, message = told.record, told.message
        self.last_time_s = max(self.last_time_s, record.unix_time_s)
        if message is None:
            self.unreadable.append(told)
            return
        match message:
            case s.GroupIssued():
                self.issued = self.issued or _at(message, told.record)
            case s.GroupClosed():
                self.closed = self.closed or _at(message, told.record)
            case s.EpisodeRequested():
                self.requested.setdefault((message.slot, message.attempt), _at(message, told.record))
            case r.EpisodeEnded():
                self.ended.setdefault((message.slot, message.attempt), _at(message, told.record))
            case r.Trajectory():
                self.ready.setdefault(message.slot, _at(message, told.record))
            case s.DeadLetter() if _group_of(message.subject) == self.group:
                self.letters.append(_at(message, told.record))
            case s.DeadRetry() if _group_of(message.subject) == self.group:
                self.retries.append(_at(message, told.record))
            case s.DeadDropped():
                self.drops.append(_at(message, told.record))
            case _:
                self._take_rollout(message, record)

    def _take_rollout(self, message: msgspec.Struct, record: Record) -> None:
        match message:
            case r.EpisodeLaunched():
                key = (message.slot, message.attempt, message.launch_try)
                self.launched.setdefault(key, _at(message, record))
            case r.EpisodeAccepted():
                key = (message.slot, message.attempt, message.launch_try)
                self.accepted.setdefault(key, _at(message, record))
            case r.SessionOpened():
                found = _at(message, record)
                self.opened.setdefault(message.session, []).append(found)
            case r.InteractionRecorded():
                calls = self.calls.setdefault(message.session, {})
                calls.setdefault(message.ordinal, _at(message, record))
            case r.SessionClosed():
                found = _at(message, record)
                self.session_closed.setdefault(message.session, found)
            case r.SessionRewarded():
                rewards = self.rewarded.setdefault(message.session, {})
                rewards.setdefault(message.ordinal, _at(message, record))
            case _:
                pass


class StepFacts:
    """What the log says about steps and versions."""

    def __init__(self) -> None:
        self.assembled: Final[dict[int, At[t.StepAssembled]]] = {}
        self.trained: Final[dict[int, At[t.StepTrained]]] = {}
        self.published: Final[dict[int, At[t.WeightsPublished]]] = {}
        self.loaded: Final[list[At[t.WeightsLoaded]]] = []
        self.superseded: Final[list[At[t.StepTrained]]] = []
        """What trainers said after a later one had spoken: nobody goes by it."""
        self._generations: Final = Generations()

    def take(self, told: Told) -> None:
        """One message; the first of a key stands, and of several trainers' the first that came."""
        message = told.message
        match message:
            case t.StepAssembled():
                self.assembled.setdefault(message.step, _at(message, told.record))
            case t.StepTrained():
                if self._generations.admits(message.generation):
                    self.trained.setdefault(message.step, _at(message, told.record))
                else:
                    self.superseded.append(_at(message, told.record))
            case t.WeightsPublished():
                if message.generation >= self._generations.newest:
                    self.published.setdefault(message.version, _at(message, told.record))
            case t.WeightsLoaded():
                self.loaded.append(_at(message, told.record))
            case _:
                pass

    def step_of(self, group: str) -> At[t.StepAssembled] | None:
        """The step that trains a group."""
        return next((step for step in self.assembled.values() if group in step.message.groups), None)

    def drop_of(self, group: str) -> tuple[At[t.StepAssembled], str] | None:
        """The step before which a waiting group was dropped, and why."""
        for step in self.assembled.values():
            for dropped in step.message.dropped:
                if dropped.group == group:
                    return step, dropped.reason
        return None


async def group_facts(source: LogSource, group: str) -> GroupFacts:
    """Read what the log says about a group."""
    run = f"{PREFIX}.{source.run}"
    facts = GroupFacts(group)
    own = [f"{run}.group.*.{group}", f"{run}.episode.*.{group}.>", f"{run}.trajectory.ready.{group}.>", f"{run}.dead.>"]
    async for record in source.read(own):
        facts.take(tell(record))
    sessions = [
        pattern
        for session in facts.sessions
        for pattern in (
            f"{run}.session.*.{session}",
            f"{run}.session.*.{session}.>",
            f"{run}.interaction.recorded.{session}.>",
        )
    ]
    if sessions:
        async for record in source.read(sessions):
            facts.take(tell(record))
    return facts


async def step_facts(source: LogSource) -> StepFacts:
    """Read what the log says about all steps."""
    run = f"{PREFIX}.{source.run}"
    facts = StepFacts()
    async for record in source.read([f"{run}.step.*.>", f"{run}.weights.*.>"]):
        facts.take(tell(record))
    return facts


def _key(subject: str) -> tuple[str, ...]:
    try:
        return split_subject(subject).key
    except InvalidIdError:
        return ()


def _group_of(subject: str) -> str:
    key = _key(subject)
    return key[0].partition("-")[0] if key else ""


def _slot_of(subject: str) -> int | None:
    """The slot in a subject's key: its own token, or inside a session's id."""
    key = _key(subject)
    if not key:
        return None
    number = key[0].split("-")[1] if "-" in key[0] else (key[1] if len(key) > 1 else "")
    return int(number) if number.isdigit() else None
